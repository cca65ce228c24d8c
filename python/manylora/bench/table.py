"""A run's result for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_METRICS = (
    ("ttft", "TTFT (ms)"),
    ("tpot", "TPOT (ms)"),
    ("itl", "ITL (ms)"),
    ("e2el", "E2E (ms)"),
    ("ttft_since_due", "TTFT since due (ms)"),
)
_MOST_ADAPTERS = 20
_COLUMNS = ("requests", "failed", "tokens", "TTFT mean", "TTFT p99", "TPOT mean", "E2E mean")


def table(result: Mapping[str, Any], percents: Sequence[float]) -> str:
    """Return the result as text."""
    lines = [*_totals(result), "", *_times(result, percents), *_adapters(result), *_failures(result)]
    if result["sender_was_late"]:
        lines += [
            "",
            f"The sender itself was late (p99 {_p99(result, 'sender_lateness'):.1f} ms): this machine was too busy to "
            "send the load that was asked for, and the figures are of a gentler one.",
        ]
    return "\n".join(lines)


def _p99(result: Mapping[str, Any], name: str) -> float:
    return float(result[f"p99_{name}_ms"])


def _totals(result: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, str]] = [
        ("Completed / failed requests", f"{result['completed']} / {result['failed']}"),
        ("Duration (s)", f"{result['duration']:.2f}"),
        ("Input / output tokens", f"{result['total_input_tokens']} / {result['total_output_tokens']}"),
        ("Requests/s", f"{result['request_throughput']:.2f}"),
        ("Output tokens/s (peak)", f"{result['output_throughput']:.1f} ({result['max_output_tokens_per_s']:.0f})"),
        ("All tokens/s", f"{result['total_token_throughput']:.1f}"),
        ("Requests at a time, at most", str(result["max_concurrent_requests"])),
    ]
    if "request_goodput" in result:
        rows.append(("Good requests/s", f"{result['request_goodput']:.2f}"))
    rows.append(
        (
            "Sender late, mean / p99 (ms)",
            f"{result['mean_sender_lateness_ms']:.2f} / {_p99(result, 'sender_lateness'):.2f}",
        )
    )
    if result["max_concurrency"]:
        rows.append(
            (
                "Wait for a place, mean / p99 (ms)",
                f"{result['mean_wait_for_place_ms']:.1f} / {_p99(result, 'wait_for_place'):.1f}",
            )
        )
    if result["output_tokens_counted_by"] == "events":
        rows.append(("Output tokens", "counted by events: the server tells no usage"))
    return [f"{name:34} {value}" for name, value in rows]


def _times(result: Mapping[str, Any], percents: Sequence[float]) -> list[str]:
    columns = ["mean", *(f"p{percent:g}" for percent in percents)]
    lines = [f"{'':20}" + "".join(f"{column:>11}" for column in columns)]
    for name, title in _METRICS:
        lines.append(f"{title:20}" + "".join(f"{result[f'{column}_{name}_ms']:11.2f}" for column in columns))
    return lines


def _adapters(result: Mapping[str, Any]) -> list[str]:
    rows: Mapping[str, Mapping[str, Any]] = result["adapters"]
    width = min(40, max([7, *(len(name) for name in rows)]))
    titles = "".join(f"{title:>11}" for title in _COLUMNS)
    lines = ["", f"{'adapter':{width}}{titles}"]
    for name, row in list(rows.items())[:_MOST_ADAPTERS]:
        shown = name if len(name) <= width else name[: width - 3] + "..."
        counts = (row["completed"] + row["failed"], row["failed"], row["total_output_tokens"])
        times = (row[f"{key}_ms"] for key in ("mean_ttft", "p99_ttft", "mean_tpot", "mean_e2el"))
        cells = [*(f"{count:11}" for count in counts), *(f"{time:11.2f}" for time in times)]
        lines.append(f"{shown:{width}}{''.join(cells)}{'  (base)' if row['is_base'] else ''}")
    if len(rows) > _MOST_ADAPTERS:
        lines.append(f"... and {len(rows) - _MOST_ADAPTERS} more (--output has them all)")
    if result["jain_index"] is not None:
        lines.append(f"Jain's index over the adapters' tokens/s per request: {result['jain_index']:.4f}")
    if result["worst_over_mean_ttft"] is not None:
        lines.append(f"Worst adapter's TTFT over the mean: {result['worst_over_mean_ttft']:.2f}")
    return lines


def _failures(result: Mapping[str, Any]) -> list[str]:
    failures: Mapping[str, int] = result["failures"]
    return ["", "Failed:", *(f"{count:7} x {reason}" for reason, count in failures.items())] if failures else []
