"""What is measured, and how fast this machine could do it at most."""

from dataclasses import asdict, dataclass
from typing import Any

from shapes import ADAPTERS, RANK, Shape

# Bytes of a weight and of a cached key or value in bf16, which every engine is held against, whatever it computes in.
BYTES = 2


@dataclass(frozen=True)
class Case:
    """Rows of one batch, each on an adapter or on the base (None)."""

    name: str
    kind: str
    """`decode` and `prefill` count tokens/s, `cold` the milliseconds that an adapter's first use adds."""
    adapters: tuple[int | None, ...]
    prompt: int
    tokens: int
    """New tokens per row."""

    @property
    def unit(self) -> str:
        """What its value is given in."""
        return "ms" if self.kind == "cold" else "tokens/s"

    @property
    def needs(self) -> str:
        """What an engine must be able to do: `base`, `one` adapter for a whole batch, or `mixed` adapters."""
        distinct = set(self.adapters)
        return "base" if distinct == {None} else "one" if len(distinct) == 1 else "mixed"

    def plan(self, seed: int) -> dict[str, Any]:
        """What a worker is told of it; prompts are drawn from `seed`."""
        return asdict(self) | {"seed": seed}

    def floor(self, shape: Shape, limits: dict[str, float]) -> float | None:
        """Tokens/s that the machine's limits allow: reading all bytes, or all arithmetic, whichever takes longer."""
        if self.kind == "cold":
            return None
        rows = len(self.adapters)
        distinct = len(set(self.adapters) - {None})
        adapted = sum(adapter is not None for adapter in self.adapters)
        body, head, adapter = shape.body_parameters(), shape.head_parameters(), shape.adapter_parameters(RANK)
        weights = body + head + distinct * adapter
        if self.kind == "decode":
            # Of the middle step.
            cached = rows * (self.prompt + self.tokens // 2) * 2 * shape.layers * shape.kv_heads * shape.head_dim
            multiplied, made = rows * (body + head) + adapted * adapter, rows
        else:
            # Only last rows meet the head; half of the square of positions is attended to, twice.
            cached = 0
            attention = rows * shape.layers * shape.heads * shape.head_dim * self.prompt**2
            multiplied = self.prompt * (rows * body + adapted * adapter) + rows * head + attention
            made = rows * self.prompt
        seconds = max(BYTES * (weights + cached) / limits["bandwidth"], 2 * multiplied / limits["peak"])
        return made / seconds


def decode(name: str, adapters: list[int | None]) -> Case:
    """A decode case: more rows take fewer tokens each, so that slow engines end, too."""
    return Case(f"decode, {name}", "decode", tuple(adapters), 16, {1: 33, 8: 17, 32: 9}[len(adapters)])


def in_turn(rows: int) -> list[int | None]:
    """Rows on all adapters in turn."""
    return [row % ADAPTERS for row in range(rows)]


# Base first: some engines cannot take adapters off again at no cost.
CASES = (
    decode("1 base row", [None]),
    decode("8 base rows", [None] * 8),
    decode("32 base rows", [None] * 32),
    Case("prefill, 512 base tokens", "prefill", (None,), 512, 1),
    decode("1 row on one adapter", [0]),
    decode("8 rows on one adapter", [0] * 8),
    decode("32 rows on one adapter", [0] * 32),
    Case("prefill, 512 tokens on an adapter", "prefill", (0,), 512, 1),
    Case("first token, cold adapter", "cold", (0,), 16, 1),
    decode("8 rows on 8 adapters", in_turn(8)),
    decode("32 rows on 8 adapters", in_turn(32)),
)
# Those whose greedy tokens are compared between engines, from the same prompts in each; the last with an adapter that
# is loaded when the engine runs already.
COMPARED = (CASES[1], CASES[5], CASES[9], decode("8 rows on a cold adapter", [ADAPTERS] * 8))
