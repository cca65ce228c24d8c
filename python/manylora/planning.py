"""`manylora.plan(...)`: what of a model, its adapters and its sequences fits, in bytes and without a card."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manylora import _core
from manylora.arguments import BY_NAME
from manylora.engine_args import check
from manylora.exceptions import ValidationError

# Arguments of `LLM(...)` that decide what fits.
ENGINE_ARGUMENTS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "batch_invariant",
    "enable_chunked_prefill",
    "max_lora_rank",
    "max_loras",
    "max_cpu_loras",
    "lora_memory_bytes",
    "num_threads",
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class PlanBytes:
    """Where the bytes go: all but `total` and `unused` add up to `budget`.

    Attributes:
        total: what there is: a card's memory, or a processor's free memory.
        budget: what the engine may take.
        unused: what is left to others.
        driver: what the card's driver takes.
        base: the base's weights.
        workspace: activations, tables, what kernels need.
        adapters: adapters that are resident.
        kv_blocks: KV blocks beside them.
        rest: what is no whole block, or not asked for.

    """

    total: int
    budget: int
    unused: int
    driver: int
    base: int
    workspace: int
    adapters: int
    kv_blocks: int
    rest: int


@dataclass(frozen=True)
class PlannedGroup:
    """Adapters of one rank.

    Attributes:
        count: how many there are.
        resident: how many of them have room at a time.
        rank: their rank.
        target_modules: what they touch.
        parameters: of one.
        bytes: of one, as the engine's ledger charges it.

    """

    count: int
    resident: int
    rank: int
    target_modules: list[str]
    parameters: int
    bytes: int


@dataclass(frozen=True)
class PlannedSequences:
    """Sequences of one length.

    Attributes:
        tokens: of one, prompt and output.
        bytes: of its KV blocks.
        fit: how many have room beside the resident adapters.
        fit_without_adapters: how many would without any.
        running: how many run at a time: `max_num_seqs` caps them.

    """

    tokens: int
    bytes: int
    fit: int
    fit_without_adapters: int
    running: int


@dataclass(frozen=True)
class ModuleParameters:
    """One module of a layer: `shape` is (output, input), `ratio` how many times fewer parameters an adapter has."""

    module: str
    shape: list[int]
    base_parameters: int
    adapter_parameters: int
    ratio: float


@dataclass(frozen=True)
class MaxRankReservation:
    """Engines that reserve a place of the largest rank on every module for each adapter of a step, against this one.

    Attributes:
        slots: places: `max_loras`, or one for each adapter.
        max_lora_rank: the setting.
        reserved_bytes: what such an engine reserves.
        used_bytes: the factors of the adapters in those places.
        wasted_bytes: the difference.
        lost_sequences: sequences of the first length that have no room for it.
        charged_here_bytes: what this engine's ledger charges for the same adapters.
        workspace_here_bytes: by how much its working memory grows from the largest rank there is to `max_lora_rank`.

    """

    slots: int
    max_lora_rank: int
    reserved_bytes: int
    used_bytes: int
    wasted_bytes: int
    lost_sequences: int
    charged_here_bytes: int
    workspace_here_bytes: int


@dataclass(frozen=True)
class FullCopies:
    """As many full fine-tunes as there are adapters: bytes of their weights, and how many fit."""

    count: int
    bytes: int
    fit: int


@dataclass(frozen=True)
class PlannedQuantization:
    """A quantized checkpoint: what is loaded, what it would take as it is stored, and a line that says so."""

    scheme: str
    loaded_bytes: int
    packed_bytes: int
    note: str


@dataclass(frozen=True)
class Plan:
    """The answer of `manylora.plan`.

    Attributes:
        model: its name or path.
        parameters: of the base.
        device: the card, or `cpu`.
        dtype: how numbers are stored.
        bytes: where the bytes go.
        ledger_bytes: what KV blocks and adapters share.
        block_bytes: of one KV block.
        block_size: tokens of one.
        total_blocks: KV blocks without any adapter.
        blocks: KV blocks beside the resident adapters.
        max_num_batched_tokens: rows of a step.
        max_model_len: longest sequence.
        adapter_room: bytes that adapters can take at most.
        most_adapters: how many have room if all are like the first group's.
        fleet: the adapters.
        fleet_bytes: of all of them.
        sequences: one for each length that was asked for.
        modules: base and adapter parameters of each module.
        reservation: what `max_lora_rank` costs elsewhere and here; None without adapters.
        full_copies: full fine-tunes in the adapters' place.
        quantization: of a quantized checkpoint.
        notes: what was decided.
        warnings: settings that will hurt, each named.

    """

    model: str
    parameters: int
    device: str
    dtype: str
    bytes: PlanBytes
    ledger_bytes: int
    block_bytes: int
    block_size: int
    total_blocks: int
    blocks: int
    max_num_batched_tokens: int
    max_model_len: int
    adapter_room: int
    most_adapters: int
    fleet: list[PlannedGroup]
    fleet_bytes: int
    sequences: list[PlannedSequences]
    modules: list[ModuleParameters]
    reservation: MaxRankReservation | None
    full_copies: FullCopies
    quantization: PlannedQuantization | None
    notes: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as dictionaries and lists."""
        return dataclasses.asdict(self)


def plan(
    model: str,
    *,
    gpu: str,
    adapters: int = 0,
    rank: int | Sequence[int] = 16,
    target_modules: str | Sequence[str] = ATTENTION,
    lengths: int | Sequence[int] = (),
    hot_adapters: int | None = None,
    memory_bytes: int | None = None,
    **engine: Any,
) -> Plan:
    """Return what of a model, its adapters and its sequences fits.

    Bytes are those that the engine's ledger charges.

    Args:
        model: a name that is built in (`Qwen2.5-7B-Instruct`), or the path of a checkpoint or of a config.json.
        gpu: a card by name (`rtx4090`), or `cpu`: this machine.
        adapters: how many.
        rank: their rank, or several that they have in turn.
        target_modules: what they touch, in every layer; `all-linear` is all seven.
        lengths: tokens of sequences, prompt and output; none = `max_model_len`.
        hot_adapters: how many adapters requests ask for at a time; None = all of them.
        memory_bytes: the card's memory, or the processor's free memory, where it is another.
        engine: arguments of `LLM(...)`: `max_loras`, `max_lora_rank`, `max_num_seqs` and what else decides sizes.

    Raises:
        ValidationError: an argument is wrong, or nothing fits; the message names it.

    """
    ranks = [rank] if isinstance(rank, int) else list(rank)
    modules = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    if not isinstance(model, str) or not model:
        raise ValidationError(f"model must be a name or a path, got {model!r}")
    if not isinstance(gpu, str) or not gpu:
        raise ValidationError(f"gpu must be a card's name or cpu, got {gpu!r}")
    if not ranks:
        raise ValidationError("rank must be a number or several, got none")
    ranks = [_whole("rank", one, 1) for one in ranks]
    question = {
        "model": model,
        "gpu": gpu.strip().lower() if gpu.strip().lower() == "cpu" else gpu,
        "memory_bytes": memory_bytes if memory_bytes is None else _whole("memory_bytes", memory_bytes, 1),
        "adapters": [
            (count, one, [str(module) for module in modules])
            for one, count in _in_turn(ranks, _whole("adapters", adapters, 0))
            if count
        ],
        "lengths": [_whole("lengths", one, 1) for one in ([lengths] if isinstance(lengths, int) else lengths)],
        "hot_adapters": hot_adapters if hot_adapters is None else _whole("hot_adapters", hot_adapters, 0),
    }
    unknown = next((name for name in engine if name not in ENGINE_ARGUMENTS), None)
    if unknown is not None:
        raise ValidationError(
            f"plan() has no argument `{unknown}`; it has those of LLM() that decide sizes: "
            f"{', '.join(ENGINE_ARGUMENTS)}"
        )
    for name in ENGINE_ARGUMENTS:
        argument, value = BY_NAME[name], engine.get(name)
        question[name] = argument.default if argument.is_default(value) else check(argument, value)
    answer: Plan = _made(Plan, json.loads(_core.plan(question)))
    return answer


def _in_turn(ranks: list[int], count: int) -> list[tuple[int, int]]:
    """How many of `count` adapters have each rank, when they have them in turn."""
    return [(rank, (count - place + len(ranks) - 1) // len(ranks)) for place, rank in enumerate(ranks)]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise ValidationError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _made(kind: Any, value: Any) -> Any:
    """Return JSON as the dataclass that it stands for."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_made(inner[0], one) for one in value]
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _made(inner[0], value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{name: _made(hints[name], one) for name, one in value.items()})
    return value
