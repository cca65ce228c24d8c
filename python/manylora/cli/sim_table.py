"""What simulations come to, for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

# What a sweep's and a search's table shows of the metrics.
COLUMNS = (
    ("request_throughput", "req/s", 1.0),
    ("output_throughput", "tok/s", 1.0),
    ("ttft_p50", "TTFT p50 ms", 1000.0),
    ("ttft_p99", "TTFT p99 ms", 1000.0),
    ("itl_p50", "ITL p50 ms", 1000.0),
    ("itl_p99", "ITL p99 ms", 1000.0),
    ("e2e_p99", "E2E p99 ms", 1000.0),
    ("slo_attainment", "SLO", 1.0),
    ("hit_rate", "hit rate", 1.0),
    ("evictions", "evictions", 1.0),
    ("preemptions", "preempted", 1.0),
)
_MOST_ADAPTERS = 10
_MOST_REPLICAS = 16


def number(value: float | None) -> str:
    """Return a number with four digits that matter."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def report(result: Mapping[str, Any]) -> str:
    """Return a run's report."""
    lines = [*_totals(result), "", *_latencies(result), "", *_shelf(result), *_adapters(result), *_replicas(result)]
    lines += [f"failed: {count} x {reason}" for reason, count in result["failures"].items()]
    remarks = [f"note: {line}" for line in result["notes"]] + [f"warning: {line}" for line in result["warnings"]]
    return "\n".join([*lines, *(line for one in remarks for line in textwrap.wrap(one, 100, subsequent_indent="  "))])


def _totals(result: Mapping[str, Any]) -> list[str]:
    slo = " and ".join(f"{name} <= {limit:g} s" for name, limit in result["slo"].items() if limit is not None)
    rows = (
        ("Completed / failed requests", f"{result['completed']} / {result['failed']}"),
        ("Simulated seconds (steps ran)", f"{number(result['seconds'])} ({100 * result['busy_share']:.1f} %)"),
        ("Prompt / output tokens", f"{result['prompt_tokens']} / {result['output_tokens']}"),
        ("Requests/s", number(result["request_throughput"])),
        ("Output tokens/s", number(result["output_throughput"])),
        ("SLO attained", f"{100 * result['slo_attainment']:.2f} % ({slo or 'nothing is promised'})"),
    )
    return [f"{name:32} {value}" for name, value in rows]


def _latencies(result: Mapping[str, Any]) -> list[str]:
    columns = ("mean", "p50", "p90", "p99", "largest")
    names = (("ttft", "TTFT (ms)"), ("itl", "ITL (ms)"), ("e2e", "E2E (ms)"), ("waiting", "Waiting (ms)"))
    rows = [["", *columns]]
    for name, title in names:
        one = result[name]
        rows.append([title, *(number(1000 * one[column] if one["count"] else None) for column in columns)])
    return _aligned(rows)


def _shelf(result: Mapping[str, Any]) -> list[str]:
    shelf = result["shelf"]
    loads, asked = shelf["host_loads"] + shelf["disk_loads"], shelf["hits"] + shelf["misses"]
    rows = [
        (
            "Adapter hits",
            f"{100 * result['hit_rate']:.1f} % resident ({shelf['hits']} of {asked} requests); "
            f"of {loads} loads {100 * result['host_hit_rate']:.1f} % from the host's memory, "
            f"{shelf['disk_loads']} from disk",
        ),
        ("Evictions / preemptions", f"{shelf['evictions']} / {result['preemptions']}"),
        ("Prompt tokens from the cache", f"{100 * result['prefix_cache_hit_rate']:.1f} %"),
    ]
    if result["jain_index"] is not None:
        worst = number(result["worst_over_mean_ttft"])
        rows.append(("Fairness over adapters", f"Jain's index {result['jain_index']:.4f}; worst TTFT / mean {worst}"))
    return [f"{name:32} {value}" for name, value in rows]


def _adapters(result: Mapping[str, Any]) -> list[str]:
    adapters = sorted(result["adapters"], key=lambda row: -row["completed"])
    if not adapters or (adapters[0]["adapter"] is None and len(adapters) == 1):
        return []
    rows = [["adapter", "requests", "failed", "tokens", "TTFT mean ms", "tok/s of a request"]]
    for row in adapters[:_MOST_ADAPTERS]:
        name = row["name"] or ("base" if row["adapter"] is None else str(row["adapter"]))
        counts = [str(row[key]) for key in ("failed", "output_tokens")]
        requests = str(row["completed"] + row["failed"])
        rows.append([name[:32], requests, *counts, number(1000 * row["mean_ttft"]), number(row["mean_rate"])])
    rest = len(adapters) - _MOST_ADAPTERS
    return ["", *_aligned(rows), *([f"... and {rest} more (--json has them all)"] if rest > 0 else [])]


def _replicas(result: Mapping[str, Any]) -> list[str]:
    replicas, spread = result["replicas"], result["spread"]
    if spread is None:
        return []
    rows = [["replica", "requests", "busy", "TTFT mean ms", "hit rate", "loads", "adapters"]]
    for place, row in enumerate(replicas[:_MOST_REPLICAS]):
        cells = [f"{100 * row['busy_share']:.1f} %", number(1000 * row["mean_ttft"]), number(row["hit_rate"])]
        rows.append([str(place), str(row["requests"]), *cells, str(row["loads"]), str(row["adapters"])])
    rest = len(replicas) - _MOST_REPLICAS
    largest = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in spread.items())
    return [
        "",
        *_aligned(rows),
        *([f"... and {rest} more (--json has them all)"] if rest > 0 else []),
        f"Largest over mean of the replicas: {largest}",
    ]


def _row(parameters: Mapping[str, Any], metrics: Mapping[str, float | None]) -> list[str]:
    told = [value if isinstance(value, str) else number_or_text(value) for value in parameters.values()]
    scaled = ((metrics[name], scale) for name, _, scale in COLUMNS)
    return [*told, *(number(None if value is None else value * scale) for value, scale in scaled)]


def number_or_text(value: Any) -> str:
    """Return a parameter's value for people."""
    if value is None:
        return "none"
    return number(value) if isinstance(value, float) else str(value)


def sweep(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sweep's rows."""
    titles = [*rows[0]["parameters"], *(title for _, title, _ in COLUMNS)]
    return "\n".join(_aligned([titles, *(_row(row["parameters"], row["metrics"]) for row in rows)]))


def found(result: Mapping[str, Any]) -> str:
    """Return a search's answer, and what it ran."""
    trials = result["trials"]
    titles = [result["parameter"], *(title for _, title, _ in COLUMNS), "holds"]
    rows = [[*_row(one["parameters"], one["metrics"]), "yes" if one["holds"] else "no"] for one in trials]
    wanted, name = " and ".join(result["conditions"]), result["parameter"]
    value, beyond = result["value"], result["beyond"]
    if value is None:
        answer = f"nowhere in this range: {wanted} does not hold at {name}={number_or_text(beyond)}, either"
    elif beyond is None:
        answer = f"{name}={number_or_text(value)}, the end of the range: {wanted} holds throughout"
    else:
        answer = f"{name}={number_or_text(value)}: {wanted} holds, and does not at {number_or_text(beyond)}"
    return "\n".join([*_aligned([titles, *rows]), "", answer])
