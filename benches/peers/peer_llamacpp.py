"""llama.cpp, through the C interface that its Python binding exposes: many sequences in one batch, the base only."""

from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
import worker

# Most rows, and tokens of a row, of the cases.
SEQUENCES, CONTEXT = 32, 768


class Batch:
    """Tokens of many sequences that are computed together."""

    def __init__(self, capacity: int):
        self.native = llama_cpp.llama_batch_init(capacity, 0, 1)
        self.native.n_tokens = 0

    def add(self, token: int, position: int, sequence: int, sampled: bool) -> None:
        """Add a token; logits are computed for those that a token is sampled after."""
        at = self.native.n_tokens
        self.native.token[at] = token
        self.native.pos[at] = position
        self.native.n_seq_id[at] = 1
        self.native.seq_id[at][0] = sequence
        self.native.logits[at] = sampled
        self.native.n_tokens = at + 1


def load(plan: dict[str, Any]) -> worker.Loaded:
    """Load the GGUF file."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(plan["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp did not load `{plan['model']}`")
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_seq_max = SEQUENCES * CONTEXT, SEQUENCES
    # Every sequence has keys and values of its own: no row looks at others' to mask them.
    wanted.n_batch, wanted.kv_unified = 2048, False
    wanted.n_threads = wanted.n_threads_batch = plan["threads"]
    context = llama_cpp.llama_init_from_model(model, wanted)
    if not context:
        raise RuntimeError("llama.cpp did not make a context")
    memory = llama_cpp.llama_get_memory(context)
    batch = Batch(wanted.n_batch)

    def compute() -> None:
        code = llama_cpp.llama_decode(context, batch.native)
        if code != 0:
            raise RuntimeError(f"llama_decode of {batch.native.n_tokens} tokens returned {code}")
        batch.native.n_tokens = 0

    def best(at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, at)
        return int(np.ctypeslib.as_array(logits, (plan["vocab"],)).argmax())

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        if any(row is not None for row in rows):
            raise ValueError("llama.cpp has its adapters for the whole context: only the base is measured here")
        # Forgets; what lies there need not be overwritten.
        llama_cpp.llama_memory_clear(memory, False)
        found: list[list[int]] = [[] for _ in prompts]
        for sequence, prompt in enumerate(prompts):
            # A batch ends where a prompt does.
            if batch.native.n_tokens + len(prompt) > wanted.n_batch:
                raise ValueError(f"prompts of more than {wanted.n_batch} tokens together")
            for position, token in enumerate(prompt):
                batch.add(token, position, sequence, position == len(prompt) - 1)
        last = [sum(map(len, prompts[: sequence + 1])) - 1 for sequence in range(len(prompts))]
        while True:
            compute()
            for sequence, at in enumerate(last):
                found[sequence].append(best(at))
            if len(found[0]) == tokens:
                return found
            for sequence, row in enumerate(found):
                batch.add(row[-1], len(prompts[sequence]) + len(row) - 1, sequence, True)
            last = list(range(len(prompts)))

    return worker.Loaded(generate, {"llama-cpp-python": version("llama-cpp-python")}, f"{plan['dtype']} weights")


if __name__ == "__main__":
    worker.main(load)
