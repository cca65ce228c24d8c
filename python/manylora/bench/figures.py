"""The pictures of a report, as data: what is drawn, and not how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manylora.bench.measure import Measurement
from manylora.bench.summary import METRICS, timeline

# More points than a picture has pixels only make a file large.
_MOST_POINTS = 400
_MOST_BARS = 30


@dataclass(frozen=True)
class Series:
    """A curve, or the bars of one colour."""

    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        labels: what the bars stand for; no bars, but curves, where there are none.

    """

    title: str
    x_title: str
    y_title: str
    series: list[Series]
    labels: tuple[str, ...] = ()


def figures(result: Mapping[str, Any], measured: Sequence[Measurement], start: float, end: float) -> list[Figure]:
    """Return the pictures of a run."""
    done = [one for one in measured if one.error is None]
    drawn = []
    for name, title in (
        ("ttft", "Time to first token"),
        ("itl", "Inter-token latency"),
        ("e2el", "End-to-end latency"),
    ):
        times = sorted(time * 1000 for one in done for time in METRICS[name](one))
        drawn.append(Figure(f"{title}: share of all below", "ms", "share", [Series(title, _distribution(times))]))
    tokens, running = timeline(measured, start, end)
    drawn.append(Figure("Output tokens in each second", "s", "tokens/s", [Series("tokens/s", _numbered(tokens))]))
    drawn.append(Figure("Requests at a time", "s", "requests", [Series("requests", _numbered(running))]))
    rows = list(result["adapters"].items())[:_MOST_BARS]
    drawn.append(
        Figure(
            "Time to first token by adapter, most requested first",
            "",
            "ms",
            [
                Series(column, _numbered([row[f"{column}_ttft_ms"] for _, row in rows]))
                for column in ("mean", _highest(result))
            ],
            tuple(name for name, _ in rows),
        )
    )
    return [figure for figure in drawn if any(series.points for series in figure.series)]


def _highest(result: Mapping[str, Any]) -> str:
    percents = [key.removesuffix("_ttft_ms") for key in result if key.startswith("p") and key.endswith("_ttft_ms")]
    return max(percents, key=lambda name: float(name[1:]))


def _numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(number), float(value)) for number, value in enumerate(values)]


def _distribution(ordered: Sequence[float]) -> list[tuple[float, float]]:
    count = len(ordered)
    places = (
        range(count)
        if count <= _MOST_POINTS
        else [number * (count - 1) // (_MOST_POINTS - 1) for number in range(_MOST_POINTS)]
    )
    return [(ordered[place], (place + 1) / count) for place in places]
