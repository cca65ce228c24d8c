"""`manylora.merge(...)`: a base and adapters as one checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm.auto import tqdm

from manylora import _core, hub
from manylora.exceptions import ValidationError
from manylora.inspection import adapter_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Bytes of a file of weights.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Merged:
    """What `manylora.merge` wrote.

    Attributes:
        output: the folder.
        dtype: number format.
        shards: files of weights.
        bytes: of all tensors.
        changed: tensors that differ from the base's.
        untied: whether head and embedding were one matrix and are two now.
        notes: what is worth knowing: a base that was dequantized, warnings about adapters.

    """

    output: str
    dtype: str
    shards: int
    bytes: int
    changed: int
    untied: bool
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dictionary."""
        return dataclasses.asdict(self)


def merge(
    base: str | os.PathLike[str],
    adapters: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    hf_token: str | bool | None = None,
    revision: str | None = None,
    use_tqdm: bool = True,
) -> Merged:
    """Write a base with adapters in its weights, W + the sum of weight x scale x B A, as a Hugging Face checkpoint.

    It computes what an engine computes for a request with these adapters, each with its weight as its scale. Sums are
    float64, rounded once. A few blocks of rows are in memory at a time, and the factors of the adapters.

    Args:
        base: folder, GGUF file or hub id; a quantized one is dequantized.
        adapters: one or more, by folder, hub id or URL.
        output: the folder to make. It appears whole, by a rename, or not at all.
        weights: a factor for each adapter; None = 1.
        dtype: `auto` (what the base's configuration names), `float32`, `bfloat16` or `float16`.
        max_shard_bytes: bytes of a file of weights.
        overwrite: replace a checkpoint that is there already.
        hf_token: token of the hub; None uses the one that is logged in.
        revision: of the base on the hub.
        use_tqdm: show progress.

    Raises:
        ValidationError: an argument is wrong, or the output cannot be written.
        ModelError, HubError: the base cannot be read, or not be fetched; or a value does not fit the format.
        AdapterError: an adapter is refused, as by the engine.

    """
    listed = [adapters] if isinstance(adapters, (str, os.PathLike)) else list(adapters)
    if not listed:
        raise ValidationError("merge needs an adapter, got none")
    factors = [1.0] * len(listed) if weights is None else [_factor(one) for one in weights]
    if len(factors) != len(listed):
        raise ValidationError(
            f"there must be a weight for each adapter: {len(listed)} adapters, {len(factors)} weights"
        )
    if dtype not in DTYPES:
        raise ValidationError(f"dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or not 0 < max_shard_bytes < 1 << 63:
        raise ValidationError(f"max_shard_bytes must be a positive integer, got {max_shard_bytes!r}")
    wanted = {
        "base": str(hub.resolve_model(os.fspath(base), revision=revision, token=hf_token)),
        "base_names": [os.fspath(base).rstrip("/"), hub.repository(os.fspath(base).rstrip("/"))],
        "adapters": [
            (str(adapter_folder(os.fspath(path), hf_token)), factor)
            for path, factor in zip(listed, factors, strict=True)
        ],
        "output": str(Path(output).expanduser()),
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
        "overwrite": bool(overwrite),
    }
    bar: tqdm[NoReturn]
    with tqdm(desc="Merging", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=not use_tqdm) as bar:
        answer = _core.merge(wanted, _shown_by(bar))
    return Merged(**json.loads(answer))


def _factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValidationError(f"a weight must be a finite number, got {value!r}")
    return float(value)


def _shown_by(bar: tqdm[NoReturn]) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show
