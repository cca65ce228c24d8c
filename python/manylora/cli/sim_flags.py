"""The flags of `manylora sim`: short names for the parameters that are changed most, and `--set` for all others."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from manylora.flags import amount

WORKLOADS = ("synthetic", "slora", "punica", "azure_functions", "trace")
# Values of a range beyond this are a mistake.
_MOST_VALUES = 1000

# Flag, metavar, what it means. Their names are those of the parameters.
_SERVED = (
    ("adapters", "N", "how many adapters (default: as many as the load asks for, if it says so, else none)"),
    ("rank", "R[,R...]", "their rank, or several in turn (default: 16)"),
    ("rank-shares", "S[,S...]", "shares of the adapters that have each rank (default: all alike)"),
    ("target-modules", "M[,M...]", "what they touch, or all-linear (default: q_proj,k_proj,v_proj,o_proj)"),
)
_LOAD = (
    ("rate", "X", "requests a second (default: 1)"),
    ("cv", "X", "burstiness: coefficient of variation of the gaps (default: 1, a Poisson process)"),
    ("duration", "S", "seconds in which requests arrive (default: 300)"),
    ("requests", "N", "how many requests (default: rate x duration)"),
    ("popularity", "MIX", "uniform, zipf:S, power:ALPHA, ycsb:THETA, bimodal:RATIO (default: zipf:1)"),
    ("alpha", "X", "exponent of S-LoRA's power law; ratio of Punica's skewed mix"),
    ("base-share", "X", "share of requests for the base (default: 0)"),
    (
        "input",
        "LENGTHS",
        "prompts: 128, 64:256, lognormal:MEDIAN:MEAN, azure_conversation, azure_code (default: 8:511)",
    ),
    ("output", "LENGTHS", "outputs, likewise (default: 8:511)"),
    ("speed", "X", "how many times faster a trace is replayed (default: 1)"),
    ("seed", "N", "seed of all that is drawn (default: 42)"),
)
_ENGINE = (
    ("max-loras", "N", "distinct adapters per step (default: no cap)"),
    ("max-cpu-loras", "N", "resident adapters (default: unbounded)"),
    ("max-lora-rank", "R", "largest rank that is accepted (default: 16)"),
    ("max-num-seqs", "N", "sequences per step (default: 64)"),
    ("max-num-batched-tokens", "N", "rows per step (default: 2048)"),
    ("max-model-len", "N", "longest sequence (default: the model's context, lowered to what fits)"),
    ("block-size", "N", "tokens per KV block (default: 16)"),
    ("kv-cache-memory-bytes", "BYTES", "bytes shared by KV blocks and adapters (default: what is left)"),
    ("gpu-memory-utilization", "X", "share of the card's memory that is taken (default: 0.92)"),
    ("lora-memory-bytes", "BYTES", "most bytes of adapters (default: elastic)"),
    ("host-cache-bytes", "BYTES", "bytes of adapters' files that the host's memory keeps (default: all)"),
    ("scheduling-policy", "POLICY", "fair, fcfs or priority (default: fair)"),
    ("lora-eviction", "POLICY", "lru or cost_aware (default: lru)"),
    ("loader-threads", "N", "threads that read adapters (default: 2)"),
)
_FLEET = (
    ("replicas", "N", "engines, each on a card of its own (default: 1)"),
    ("router", "KIND", "round_robin, least_loaded, random_two_choices or consistent_hashing (default: round_robin)"),
    ("router-load-bound", "X", "of consistent hashing: times the mean load that a replica may have (default: 1.25)"),
)
_SLO = (
    ("ttft", "S", "time to first token (default: 6)"),
    ("tpot", "S", "mean time between a request's tokens (default: none)"),
    ("e2e", "S", "from arrival to end (default: none)"),
)
_LISTS = ("rank", "rank_shares", "target_modules")


@dataclass(frozen=True)
class Range:
    """A parameter, the least and the most that is tried, and how near is near enough."""

    parameter: str
    low: float
    high: float
    tolerance: float | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    group = parser.add_argument_group("what is simulated")
    # Not `config`: this file holds a configuration, and no flags.
    group.add_argument("--config", dest="config_file", metavar="FILE", help="YAML or JSON; flags win over it")
    group.add_argument("--model", metavar="MODEL", help="a model's name, or the path of a checkpoint or a config.json")
    group.add_argument("--gpu", metavar="CARD", help="a card's name, or cpu with --calibration")
    group.add_argument("--calibration", metavar="FILE", help="what `manylora sim calibrate` wrote, for what steps take")
    _add(group, _SERVED)
    group = parser.add_argument_group("load")
    group.add_argument("--workload", choices=WORKLOADS, help="which kind (default: synthetic)")
    group.add_argument("--trace", metavar="FILE", help="requests from a file, one JSON object a line")
    _add(group, _LOAD)
    _add(parser.add_argument_group("engine, as `manylora serve` has it"), _ENGINE)
    _add(parser.add_argument_group("fleet"), _FLEET)
    _add(parser.add_argument_group("what is promised, in seconds"), _SLO, "slo-")
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="any other parameter; --show-config has them all",
    )
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        type=_axis,
        metavar="NAME=VALUES",
        help="run with each value: max_loras=1,2,4 or rate=1:10:1; several --sweep: every combination",
    )
    group.add_argument(
        "--find-smallest", type=_range, metavar="NAME=LOW:HIGH", help="the smallest value that meets --such-that"
    )
    group.add_argument(
        "--find-largest", type=_range, metavar="NAME=LOW:HIGH", help="the largest; LOW:HIGH:0.01 says how near"
    )
    group.add_argument(
        "--find-rate",
        type=lambda text: _range(f"rate={text}"),
        metavar="LOW:HIGH",
        help="the knee: the largest rate that meets --such-that",
    )
    group.add_argument(
        "--such-that",
        action="append",
        default=[],
        metavar="CONDITION",
        help='"ttft_p99 < 0.5", and so on (default: slo_attainment >= --attainment)',
    )
    group.add_argument(
        "--attainment", type=_share, default=0.99, metavar="X", help="share that must attain the SLO (default: 0.99)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the answer as JSON")
    output.add_argument("--plot", metavar="FILE", help="draw it, in .svg, .html or .png (which needs matplotlib)")
    output.add_argument(
        "--show-config", action="store_true", help="print the whole configuration as JSON, and run nothing"
    )


def _add(group: Any, flags: tuple[tuple[str, str, str], ...], prefix: str = "") -> None:
    for name, metavar, text in flags:
        dest = f"{prefix}{name}".replace("-", "_")
        read: Callable[[str], Any] = _items if name.replace("-", "_") in _LISTS else value
        group.add_argument(f"--{prefix}{name}", dest=dest, type=read, metavar=metavar, help=text)


def changes(arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the parameters that the command line changes, in order: flags, then `--set`."""
    given = vars(arguments)
    changed = []
    for section, flags in (("", _SERVED), ("", _LOAD), ("engine.", _ENGINE), ("", _FLEET), ("slo.", _SLO)):
        for name, _, _ in flags:
            plain = name.replace("-", "_")
            found = given[f"slo_{plain}" if section == "slo." else plain]
            if found is not None:
                changed.append((section + plain, None if found is _NOTHING else found))
    return changed + [(name, None if one is _NOTHING else one) for name, one in arguments.set]


class _Nothing:
    """The value `none`, which is not the same as a flag that was not given."""


_NOTHING = _Nothing()


def value(text: str) -> Any:
    """Read a value: a number, perhaps with a unit (`2G`), `true`, `false`, `none`, JSON, or text."""
    if text.lower() in ("none", "null"):
        return _NOTHING
    read = amount(text)
    if isinstance(read, float) and not math.isfinite(read):
        raise argparse.ArgumentTypeError(f"a finite number is needed, got `{text}`")
    return read


def _items(text: str) -> Any:
    listed = value(text)
    return listed if isinstance(listed, list) else [value(item.strip()) for item in text.split(",")]


def _named(text: str) -> tuple[str, str]:
    name, sign, rest = text.partition("=")
    if not sign or not name.strip() or not rest.strip():
        raise argparse.ArgumentTypeError(f"NAME=VALUE is needed, got `{text}`")
    return name.strip().replace("-", "_"), rest.strip()


def _assignment(text: str) -> tuple[str, Any]:
    name, rest = _named(text)
    return name, value(rest)


def _numbers(text: str) -> list[Decimal] | None:
    try:
        parts = [Decimal(part) for part in text.split(":")]
    except InvalidOperation:
        return None
    return parts if all(part.is_finite() for part in parts) else None


def _number(one: Decimal) -> int | float:
    return int(one) if one == one.to_integral_value() and one.as_tuple().exponent == 0 else float(one)


def _axis(text: str) -> tuple[str, list[Any]]:
    name, rest = _named(text)
    parts = _numbers(rest)
    if parts is not None and len(parts) == 3:
        first, last, step = parts
        if step <= 0 or last < first or (last - first) / step >= _MOST_VALUES:
            raise argparse.ArgumentTypeError(f"`{rest}` is no range: FIRST:LAST:STEP, at most {_MOST_VALUES} values")
        count = int((last - first) / step) + 1
        return name, [_number(first + number * step) for number in range(count)]
    values = [value(item.strip()) for item in _parts(rest)]
    return name, [None if one is _NOTHING else one for one in values]


def _parts(text: str) -> list[str]:
    """Split at commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if any(not part.strip() for part in parts):
        raise argparse.ArgumentTypeError(f"`{text}` has an empty value")
    return parts


def _range(text: str) -> Range:
    name, rest = _named(text)
    parts = [value(part) for part in rest.split(":")]
    numbers = [part for part in parts if isinstance(part, (int, float)) and not isinstance(part, bool)]
    if len(parts) not in (2, 3) or len(numbers) != len(parts):
        raise argparse.ArgumentTypeError(f"NAME=LOW:HIGH or NAME=LOW:HIGH:TOLERANCE is needed, got `{text}`")
    return Range(name, numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else None)


def _share(text: str) -> float:
    read = value(text)
    if isinstance(read, bool) or not isinstance(read, (int, float)) or not 0 < read <= 1:
        raise argparse.ArgumentTypeError(f"a share above 0 and at most 1 is needed, got `{text}`")
    return float(read)
