"""The engines: where each is installed, what it can do, in which arithmetic it runs best, and which files it loads."""

from collections.abc import Callable
from dataclasses import dataclass

from machine import multiplies_bf16


def widest() -> str:
    """Torch and its like multiply bf16 slowly without instructions for it."""
    return "bfloat16" if multiplies_bf16() else "float32"


@dataclass(frozen=True)
class Engine:
    """One column of the comparison."""

    # Virtual environment and `peer_NAME.py`.
    name: str
    # Batches it can run: see `Case.needs`.
    can: tuple[str, ...]
    dtype: Callable[[], str]
    # Of the model's files: `safetensors`, `gguf` or `openvino`.
    files: str = "safetensors"


EVERYTHING = ("base", "one", "mixed")
# Rounds go through these in turn, so that a disturbance of the machine does not hit one engine only.
ENGINES = {
    "manylora": Engine("manylora", EVERYTHING, lambda: "bfloat16"),
    "peft": Engine("peft", EVERYTHING, widest),
    "mistralrs": Engine("mistralrs", EVERYTHING, widest),
    "vllm": Engine("vllm", EVERYTHING, widest),
    # Adapters belong to its whole batch: the first request's would be used for all.
    "openvino": Engine("openvino", ("base", "one"), widest, "openvino"),
    # Two columns: which type is faster depends on the processor.
    "llamacpp-bf16": Engine("llamacpp", ("base",), lambda: "bfloat16", "gguf"),
    "llamacpp-f16": Engine("llamacpp", ("base",), lambda: "float16", "gguf"),
}
