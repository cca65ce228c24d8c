"""What a run comes to: the fields of vLLM's result files by their names, and what many adapters add to them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from manylora.bench.measure import Measurement

# A sender that is later than this at its 99th percentile did not send the load that was asked for.
LATE = 0.025

Times = Callable[[Measurement], Iterable[float]]

METRICS: dict[str, Times] = {
    "ttft": lambda one: (one.ttft,),
    "tpot": lambda one: () if one.tpot is None else (one.tpot,),
    "itl": lambda one: one.itls,
    "e2el": lambda one: (one.e2el,),
    "ttft_since_due": lambda one: (one.ttft_since_due,),
}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ordered numbers, interpolated between the nearest two; 0 of none, as in vLLM's files."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def jain(shares: Sequence[float]) -> float | None:
    """Return Jain's index of fairness: 1 where all have the same, 1/n where one has all; None of fewer than two."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None


def statistics(times: Iterable[float], name: str, percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, deviation and percentiles of seconds, as milliseconds under vLLM's names."""
    ordered = sorted(times)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    deviation = math.sqrt(sum((time - mean) ** 2 for time in ordered) / len(ordered)) if ordered else 0.0
    values = {"mean": mean, "median": percentile(ordered, 50), "std": deviation}
    values |= {f"p{percent:g}": percentile(ordered, percent) for percent in percents}
    return {f"{kind}_{name}_ms": value * 1000 for kind, value in values.items()}


def summarize(
    measured: Sequence[Measurement],
    start: float,
    end: float,
    percents: Sequence[float] = (50, 90, 99),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the result of a run from `start` to `end`.

    `goodput` has limits in milliseconds by metric; requests within all of them count as good.
    """
    done = [one for one in measured if one.error is None]
    duration = end - start
    inputs, outputs = sum(one.input_len for one in done), sum(one.output_len for one in done)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    tokens, running = timeline(measured, start, end)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(measured) - len(done),
        "failures": dict(Counter(one.error for one in measured if one.error is not None).most_common()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(done)),
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        "max_output_tokens_per_s": max(tokens, default=0.0),
        "max_concurrent_requests": max(running, default=0),
        "output_tokens_counted_by": "server" if all(one.is_counted for one in done) else "events",
    }
    if goodput is not None:
        result["request_goodput"] = rate(sum(is_good(one, goodput) for one in done))
    for name, times in METRICS.items():
        result |= statistics((time for one in done for time in times(one)), name, percents)
    result |= statistics((one.lateness for one in measured), "sender_lateness", percents)
    result |= statistics((one.sent - one.released for one in measured), "wait_for_place", percents)
    late = percentile(sorted(one.lateness for one in measured), 99)
    result["sender_was_late"] = late > LATE
    return result | by_adapter(measured, duration, percents)


def is_good(one: Measurement, limits: Mapping[str, float]) -> bool:
    """Whether a request kept all limits, in milliseconds; of gaps, their mean counts (`tpot`)."""
    return all(time * 1000 <= limit for metric, limit in limits.items() for time in METRICS[metric](one))


def by_adapter(measured: Sequence[Measurement], duration: float, percents: Sequence[float]) -> dict[str, Any]:
    """Return how each model fared, and how evenly the adapters did.

    Evenness is of the tokens per second that an adapter's requests got while they were in the server, which does not
    depend on how many they were; and of the time to the first token, the worst adapter's mean over the mean of all.
    """
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for one in measured:
        groups[one.model].append(one)
    rows: dict[str, dict[str, Any]] = {}
    for model, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        done = [one for one in group if one.error is None]
        outputs, seconds = sum(one.output_len for one in done), sum(one.e2el for one in done)
        rows[model] = {
            "is_base": group[0].is_base,
            "completed": len(done),
            "failed": len(group) - len(done),
            "total_input_tokens": sum(one.input_len for one in done),
            "total_output_tokens": outputs,
            "output_throughput": outputs / duration if duration > 0 else 0.0,
            "tokens_per_request_second": outputs / seconds if seconds > 0 else 0.0,
        }
        for name in ("ttft", "tpot", "e2el"):
            rows[model] |= statistics((time for one in done for time in METRICS[name](one)), name, percents)
    adapters = [row for row in rows.values() if not row["is_base"] and row["completed"]]
    waits = [row["mean_ttft_ms"] for row in adapters]
    mean = sum(waits) / len(waits) if waits else 0.0
    return {
        "adapters": rows,
        "jain_index": jain([row["tokens_per_request_second"] for row in adapters]),
        "worst_over_mean_ttft": max(waits) / mean if len(waits) > 1 and mean > 0 else None,
    }


def timeline(measured: Sequence[Measurement], start: float, end: float) -> tuple[list[float], list[int]]:
    """Return, for each second of a run, its output tokens and the most requests that ran at a time in it."""
    seconds = max(1, math.ceil(end - start))
    tokens = [0.0] * seconds
    changes: list[tuple[float, int]] = []
    for one in measured:
        if one.error is None:
            share = one.output_len / len(one.tokens_at)
            for time in one.tokens_at:
                tokens[min(int(time - start), seconds - 1)] += share
        changes += [(one.sent, 1), (one.ended, -1)]
    running, most = 0, [0] * seconds
    second = 0
    for time, change in sorted(changes):
        now = min(int(time - start), seconds - 1)
        while second < now:
            second += 1
            most[second] = running
        running += change
        most[now] = max(most[now], running)
    return tokens, most


def detailed(measured: Sequence[Measurement], start: float) -> dict[str, list[Any]]:
    """Return every request's own figures in the order in which they were due, in seconds, under vLLM's names."""
    return {
        "models": [one.model for one in measured],
        "start_times": [one.sent - start for one in measured],
        "due_times": [one.due - start for one in measured],
        "input_lens": [one.input_len for one in measured],
        "output_lens": [one.output_len if one.error is None else 0 for one in measured],
        "ttfts": [one.ttft if one.error is None else 0.0 for one in measured],
        "itls": [one.itls for one in measured],
        "e2els": [one.e2el if one.error is None else 0.0 for one in measured],
        "generated_texts": [one.text for one in measured],
        "errors": [one.error or "" for one in measured],
    }
