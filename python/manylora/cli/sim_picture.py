"""Simulations as pictures: distributions of a run, lines over what was swept."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora import picture_path
from manylora.bench.figures import Figure, Series
from manylora.bench.report import HEIGHT, STYLE, WIDTH, draw_picture, page, svg
from manylora.cli.sim_table import number_or_text
from manylora.exceptions import ValidationError

# What is drawn over a swept parameter: title, unit, metrics with the name of their line, scale.
_SWEPT = (
    ("Requests", "req/s", (("request_throughput", "req/s"),), 1.0),
    ("Time to first token", "ms", (("ttft_p50", "p50"), ("ttft_p99", "p99")), 1000.0),
    ("Inter-token latency", "ms", (("itl_p50", "p50"), ("itl_p99", "p99")), 1000.0),
    ("End-to-end latency", "ms", (("e2e_p50", "p50"), ("e2e_p99", "p99")), 1000.0),
    ("SLO attainment", "share", (("slo_attainment", "share"),), 1.0),
    ("Adapter hit rate", "share", (("hit_rate", "share"),), 1.0),
)
_MOST_LINES = 8
_MOST_BARS = 30
_GAP, _HEAD = 16, 44


def check_path(path: str) -> None:
    """Check, before anything is simulated, that the picture can be drawn.

    Raises:
        ValidationError: it has another ending, its folder is not there, or what draws PNG is not installed.

    """
    picture_path.check("--plot", path, ".svg", ".html", ".png")


def check_axes(axes: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Check, before anything is simulated, that a sweep can be drawn.

    Raises:
        ValidationError: it has more parameters or values than a picture can show.

    """
    if len(axes) > 2:
        raise ValidationError("--plot shows one or two swept parameters; leave one out, or use --json")
    if len(axes) == 2 and min(len(values) for _, values in axes) > _MOST_LINES:
        raise ValidationError(
            f"--plot shows a line for each value of one parameter, at most {_MOST_LINES}; give one fewer values"
        )


def report(result: Mapping[str, Any]) -> list[Figure]:
    """Return the pictures of a run."""
    figures = []
    for name, title in (
        ("ttft", "Time to first token"),
        ("itl", "Inter-token latency"),
        ("e2e", "End-to-end latency"),
    ):
        points = [(1000 * seconds, share) for seconds, share in result["distributions"][name]]
        if points:
            figures.append(Figure(f"{title}: share of all below", "ms", "share", [Series(title, points)]))
    adapters = sorted(result["adapters"], key=lambda row: -row["completed"])[:_MOST_BARS]
    names = tuple(row["name"] or ("base" if row["adapter"] is None else str(row["adapter"])) for row in adapters)
    if len(adapters) > 1:
        means = [(float(place), 1000 * row["mean_ttft"]) for place, row in enumerate(adapters)]
        title = "Mean TTFT by adapter, most requested first"
        figures.append(Figure(title, "", "ms", [Series("mean", means)], names))
    replicas = result["replicas"]
    if len(replicas) > 1:
        ordered = sorted((row["busy_share"] for row in replicas), reverse=True)
        title = "Share of time busy by replica, busiest first"
        points = [(float(place), share) for place, share in enumerate(ordered)]
        figures.append(Figure(title, "replica", "share", [Series("busy", points)]))
    return figures


def found(result: Mapping[str, Any]) -> list[Figure]:
    """Return the pictures of what a search ran."""
    return sweep(result["trials"])


def sweep(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return the pictures of a sweep over one parameter, or over two: one of them is a line for each of its values."""
    names = list(rows[0]["parameters"])
    values = {name: _distinct(row["parameters"][name] for row in rows) for name in names}
    # The one with more values goes along, the other one is lines.
    along = max(names, key=lambda name: len(values[name]))
    others = [name for name in names if name != along]
    lines = values[others[0]] if others else [None]
    drawn = []
    for title, unit, metrics, scale in _SWEPT:
        for metric, kind in metrics:
            shown = f"{title}, {kind}" if len(metrics) > 1 and others else title
            if others:
                picked = [(f"{others[0]} {number_or_text(line)}", metric, _only(others[0], line)) for line in lines]
            elif metric == metrics[0][0]:
                picked = [(name, one, _all) for one, name in metrics]
            else:
                continue
            figure = _figure(shown, unit, scale, (along, values[along]), rows, picked)
            if any(series.points for series in figure.series):
                drawn.append(figure)
    return drawn


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _all(_: Mapping[str, Any]) -> bool:
    return True


def _only(name: str, value: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda parameters: bool(parameters[name] == value)


def _figure(
    title: str,
    unit: str,
    scale: float,
    along: tuple[str, list[Any]],
    rows: Sequence[Mapping[str, Any]],
    lines: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], bool]]],
) -> Figure:
    name, values = along
    is_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    is_line = is_numbers and len(values) > 1
    drawn = []
    for label, metric, belongs in lines:
        points = []
        for row in rows:
            value, measured = row["parameters"][name], row["metrics"][metric]
            if belongs(row["parameters"]) and measured is not None and math.isfinite(measured):
                points.append((float(value if is_line else values.index(value)), measured * scale))
        drawn.append(Series(label, sorted(points)))
    labels = () if is_line else tuple(number_or_text(value) for value in values)
    return Figure(title, name, unit, drawn, labels)


def draw(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """Draw them, in the format of the path's ending.

    Raises:
        OSError: the file cannot be written.

    """
    match path.suffix.lower():
        case ".png":
            draw_picture(str(path), title, figures)
        case ".svg":
            path.write_text(_grid(title, figures), encoding="utf-8")
        case _:
            path.write_text(page(title, "", figures), encoding="utf-8")


def _grid(title: str, figures: Sequence[Figure]) -> str:
    """Return one SVG of several."""
    width = 2 * WIDTH + 3 * _GAP
    height = _HEAD + math.ceil(len(figures) / 2) * (HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_GAP}" y="28" style="font-size:16px;font-weight:600">{html.escape(title)}</text>',
    ]
    for number, figure in enumerate(figures):
        x, y = _GAP + number % 2 * (WIDTH + _GAP), _HEAD + number // 2 * (HEIGHT + _GAP)
        parts.append(f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}">{svg(figure)}</svg>')
    return "\n".join([*parts, "</svg>", ""])
