"""Medians of the rounds, their ratios, and the table."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from cases import CASES, Case
from shapes import SHAPES

Result = dict[str, Any]


def fraction(entry: Result, case: Case, shape: str) -> float | None:
    """The share of what the machine's limits, measured around this process, allow."""
    floor = case.floor(SHAPES[shape], entry["limits"])
    value = entry["results"][case.name]["value"]
    return None if floor is None or value is None else value / floor


def median(values: Sequence[float | None]) -> float | None:
    """The median of those that could be measured."""
    valid = [value for value in values if value is not None]
    return statistics.median(valid) if valid else None


def summary(result: Result) -> Result:
    """Per engine and case: medians of values and fractions of the roofline, and how many times faster ManyLoRA is."""
    medians: Result = {}
    for engine in dict.fromkeys(entry["engine"] for entry in result["rounds"]):
        own = [entry for entry in result["rounds"] if entry["engine"] == engine]
        cases: Result = {}
        for case in CASES:
            entries = [entry for entry in own if case.name in entry["results"]]
            if not entries:
                continue
            cases[case.name] = {
                "value": median([entry["results"][case.name]["value"] for entry in entries]),
                "unit": case.unit,
                "of_roofline": median([fraction(entry, case, result["shape"]) for entry in entries]),
            }
            if case.kind == "cold":
                calls = [entry["results"][case.name]["load_call_ms"] for entry in entries]
                cases[case.name]["load_call_ms"] = statistics.median(calls)
        medians[engine] = {
            "cases": cases,
            "peak_rss_bytes": max(entry["peak_rss_bytes"] for entry in own),
            "load_seconds": statistics.median(entry["load_seconds"] for entry in own),
            "dtype": own[-1]["dtype"],
            "versions": own[-1]["versions"],
        }
    return {"medians": medians, "manylora_over": ratios(medians)}


def ratios(medians: Result) -> Result:
    """How many times as fast ManyLoRA is; None where a difference of times was lost in noise."""
    ours = medians.get("manylora", {}).get("cases", {})
    found: Result = {}
    for engine, values in medians.items():
        if engine == "manylora":
            continue
        found[engine] = {}
        for name, theirs in values["cases"].items():
            if name not in ours:
                continue
            pair = ours[name]["value"], theirs["value"]
            faster, slower = reversed(pair) if theirs["unit"] == "ms" else pair
            valid = faster is not None and slower is not None and min(faster, slower) > 0
            found[engine][name] = faster / slower if valid else None
    return found


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or that the machine was too busy to tell."""
    return "disturbed" if value is None else f"{value:.{digits}f}"


def table(result: Result) -> Iterator[str]:
    """The lines of the comparison."""
    medians = result["medians"]
    wide = max(len(case.name) for case in CASES) + 8
    yield f"{'':<{wide}}" + "".join(f"{engine:>20}" for engine in medians)
    for case in CASES:
        if not any(case.name in values["cases"] for values in medians.values()):
            continue
        line, below = f"{f'{case.name}, {case.unit}':<{wide}}", f"{'  of the roofline':<{wide}}"
        for engine, values in medians.items():
            found = values["cases"].get(case.name)
            ratio = result["manylora_over"].get(engine, {}).get(case.name)
            text = "-" if found is None else number(found["value"])
            line += f"{text if ratio is None else f'{text} (x{ratio:.2f})':>20}"
            share = None if found is None else found["of_roofline"]
            below += f"{'-' if share is None else f'{share:.2f}':>20}"
        yield line
        if case.kind != "cold":
            yield below
            continue
        calls = [values["cases"].get(case.name, {}).get("load_call_ms") for values in medians.values()]
        yield f"{'  its load call, ms':<{wide}}" + "".join(
            f"{'-' if call is None else f'{call:.1f}':>20}" for call in calls
        )
    rest = {
        "peak memory, GB": [f"{values['peak_rss_bytes'] / 1e9:.2f}" for values in medians.values()],
        "loading, seconds": [f"{values['load_seconds']:.1f}" for values in medians.values()],
        "arithmetic": [values["dtype"] for values in medians.values()],
    }
    for name, texts in rest.items():
        yield f"{name:<{wide}}" + "".join(f"{text:>20}" for text in texts)
    yield "in brackets: how many times as fast ManyLoRA is; -: the engine cannot do it, or it was not measured"


def show(result: Result) -> None:
    """Print the comparison, and where ManyLoRA is not ahead."""
    print("\n".join(table(result)))
    for engine, cases in result["manylora_over"].items():
        for name, ratio in cases.items():
            if ratio is not None and ratio <= 1:
                share = result["medians"]["manylora"]["cases"][name]["of_roofline"]
                held = "" if share is None else f", {share:.2f} of the roofline"
                print(f"BEHIND {engine} in `{name}`: {ratio:.2f} of its speed{held}")
