"""Draws a result file as an SVG next to it: medians as bars, the rounds' spread as lines."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

COLOURS = ("#1b7837", "#9970ab", "#c2a5cf")


def draw(path: Path) -> Path:
    """Draw the chart and return its path."""
    result = json.loads(path.read_text(encoding="utf-8"))
    medians = result["medians"]
    cases = list(next(iter(medians.values()))["tokens_per_second"])
    # Without a fixed salt every drawing would have other ids, and no two files could be compared.
    matplotlib.rcParams["svg.hashsalt"] = "manylora"
    figure, axes = pyplot.subplots(1, len(cases), figsize=(2.4 * len(cases), 3.4), layout="constrained")
    for axis, case in zip(axes, cases, strict=True):
        for index, (peer, colour) in enumerate(zip(medians, COLOURS, strict=False)):
            rounds = [item["results"][case]["tokens_per_second"] for item in result["rounds"] if item["peer"] == peer]
            rates = [rate for rate in rounds if rate is not None]
            middle = medians[peer]["tokens_per_second"][case]
            if middle is None:
                continue
            axis.bar(index, middle, color=colour, yerr=[[middle - min(rates)], [max(rates) - middle]], capsize=3)
            axis.annotate(
                f"{middle:.3g}", (index, max(rates)), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
        axis.set_title(case.replace(", ", ",\n"), fontsize=9)
        axis.set_xticks(range(len(medians)), list(medians), fontsize=8)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens/s")
    figure.suptitle(
        f"Qwen2.5-0.5B's shape, {result['machine']['simd']}, {result['machine']['threads']} threads", fontsize=10
    )
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    return target


if __name__ == "__main__":
    print(f"chart: {draw(Path(sys.argv[1]))}")
