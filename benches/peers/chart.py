"""Draws a result file as an SVG next to it: medians as bars, the rounds' spread as lines.

Bars are shares of what the machine's limits, measured around the same process, allow; a cold adapter's are
milliseconds.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import report
from cases import CASES, Case

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = ("#1b7837", "#762a83", "#9970ab", "#c2a5cf", "#d6604d", "#f4a582", "#fddbc7")
COLUMNS = 4


def heights(result: dict[str, Any], case: Case, engine: str) -> list[float]:
    """A case's bar in every round of an engine that has it."""
    entries = [entry for entry in result["rounds"] if entry["engine"] == engine and case.name in entry["results"]]
    if case.kind == "cold":
        found = [entry["results"][case.name]["value"] for entry in entries]
    else:
        found = [report.fraction(entry, case, result["shape"]) for entry in entries]
    return [value for value in found if value is not None]


def panel(axis: Axes, result: dict[str, Any], case: Case) -> None:
    """Draw a case."""
    engines = list(result["medians"])
    for index, (engine, colour) in enumerate(zip(engines, COLOURS, strict=False)):
        rounds = heights(result, case, engine)
        middle = report.median(rounds)
        if middle is None:
            continue
        # In the figure of milliseconds, noise may be below zero.
        axis.bar(index, middle, color=colour, yerr=[[middle - min(rounds)], [max(rounds) - middle]], capsize=3)
        value = result["medians"][engine]["cases"][case.name]["value"]
        label = "" if value is None else f"{value:.{int(value < 100)}f}"
        axis.annotate(label, (index, max(rounds)), (0, 3), textcoords="offset points", ha="center", fontsize=7)
    if case.kind != "cold":
        axis.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axis.set_title(case.name, fontsize=9)
    axis.set_xticks(range(len(engines)), engines, fontsize=7, rotation=40, ha="right")
    axis.set_ylabel("ms" if case.kind == "cold" else "of the roofline", fontsize=8)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def draw(path: Path) -> Path:
    """Draw the chart and return its path."""
    result = json.loads(path.read_text(encoding="utf-8"))
    cases = [case for case in CASES if any(case.name in values["cases"] for values in result["medians"].values())]
    # Without a fixed salt every drawing would have other ids, and no two files could be compared.
    matplotlib.rcParams["svg.hashsalt"] = "manylora"
    lines = -(-len(cases) // COLUMNS)
    figure, axes = pyplot.subplots(
        lines, COLUMNS, figsize=(3.4 * COLUMNS, 2.9 * lines), layout="constrained", squeeze=False
    )
    for axis, case in zip(axes.flat, cases, strict=False):
        panel(axis, result, case)
    for axis in axes.flat[len(cases) :]:
        axis.set_axis_off()
    described = result["machine"]
    figure.suptitle(
        f"Model `{result['shape']}`, {described['simd']}, {described['threads']} threads; numbers at bars are tokens/s"
        " (cold adapter: ms)",
        fontsize=10,
    )
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    return target


if __name__ == "__main__":
    print(f"chart: {draw(Path(sys.argv[1]))}")
