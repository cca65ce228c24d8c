"""Shapes of the models that are compared: what has to be read and computed follows from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Qwen2 decoder with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a layer's linear maps."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def body_parameters(self) -> int:
        """Weights of the layers' linear maps."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.linears().values())

    def head_parameters(self) -> int:
        """Weights of the head, which is the embedding."""
        return self.vocab * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Weights of an adapter on all linear maps of the layers."""
        return self.layers * rank * sum(outputs + inputs for outputs, inputs in self.linears().values())


SHAPES = {
    "half-billion": Shape(896, 4864, 24, 14, 2, 64, 151_936),
    # Only shows that everything runs.
    "small": Shape(128, 256, 2, 2, 1, 64, 4096),
}
# Adapters that are in use all the time, those that are loaded while the clock runs, and the rank of all.
ADAPTERS = 8
COLD_ADAPTERS = 6
RANK = 16
