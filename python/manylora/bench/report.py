"""A run's report: one HTML file that needs nothing else, or a picture."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from manylora import picture_path
from manylora.bench.figures import Figure
from manylora.exceptions import ValidationError

WIDTH, HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 44
_COLOURS = ("#1b6ca8", "#d1495b", "#3c8d4a", "#e0a030", "#7a4fa3", "#2aa198", "#8a6d3b", "#444444")
STYLE = """\
svg text{font:11px system-ui,sans-serif;fill:#444}svg .title{font-size:13px;font-weight:600;fill:#222}
"""
_PAGE_STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#222;background:#fff}
pre{background:#f5f5f5;padding:1rem;overflow-x:auto;font-size:13px}
figure{display:inline-block;margin:0 .8rem 1rem 0}
"""


def check_path(path: str) -> None:
    """Check, before a run, that its report can be written.

    Raises:
        ValidationError: it has another ending, its folder is not there, or what draws pictures is not installed.

    """
    picture_path.check("--report", path, ".html", ".png")


def write(path: str, title: str, text: str, figures: Sequence[Figure]) -> None:
    """Write the report, in the format of the path's ending.

    Raises:
        ValidationError: the file cannot be written.

    """
    try:
        if Path(path).suffix.lower() == ".png":
            draw_picture(path, title, figures)
        else:
            Path(path).write_text(page(title, text, figures), encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"the report `{path}` cannot be written: {error}") from error


def page(title: str, text: str, figures: Sequence[Figure]) -> str:
    """Return the HTML page."""
    pictures = "\n".join(f"<figure>{svg(figure)}</figure>" for figure in figures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{_PAGE_STYLE}{STYLE}</style></head><body>\n<h1>{html.escape(title)}</h1>\n"
        + (f"<pre>{html.escape(text)}</pre>\n" if text else "")
        + f"{pictures}\n</body></html>\n"
    )


def ticks(highest: float) -> list[float]:
    """Return round numbers from 0 to `highest` or a little beyond."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 4 >= highest * 0.999)
    count = math.ceil(highest / step - 1e-9)
    return [round(step * number, 10) for number in range(count + 1)]


def svg(figure: Figure) -> str:
    """Draw a picture."""
    is_bars = bool(figure.labels)
    points = [point for series in figure.series for point in series.points]
    y_ticks = ticks(max(y for _, y in points))
    x_ticks = [] if is_bars else ticks(max(x for x, _ in points))
    x_end = len(figure.labels) if is_bars else x_ticks[-1]
    plot_width, plot_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + plot_width * x / x_end, _TOP + plot_height * (1 - y / y_ticks[-1])

    bottom = _TOP + plot_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f'<text class="title" x="{_LEFT}" y="18">{html.escape(figure.title)}</text>',
    ]
    for tick in y_ticks:
        _, y = at(0, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = at(tick, 0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    middle = _LEFT + plot_width / 2
    parts.append(f'<text x="{middle:.0f}" y="{bottom + 34}" text-anchor="middle">{html.escape(figure.x_title)}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="{_TOP - 8}" text-anchor="end">{html.escape(figure.y_title)}</text>')
    for number, series in enumerate(figure.series):
        colour = _COLOURS[number % len(_COLOURS)]
        if is_bars:
            width = 0.8 / len(figure.series)
            for x, y in series.points:
                left, top = at(x + 0.1 + number * width, y)
                right, _ = at(x + 0.1 + (number + 1) * width, y)
                label = html.escape(f"{figure.labels[int(x)]}: {series.name} {y:.2f} {figure.y_title}")
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
                    f'fill="{colour}"><title>{label}</title></rect>'
                )
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in series.points))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(figure.series) > 1:
            # Few short names have room below the picture; others are a list in it.
            is_short = len(figure.series) <= 3 and all(len(one.name) <= 6 for one in figure.series)
            x = WIDTH - _RIGHT - 60 * (len(figure.series) - number) if is_short else _LEFT + 8
            y = bottom + 26 if is_short else _TOP + 6 + 14 * number
            parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 14}" y="{y + 9}">{html.escape(series.name)}</text>')
    if is_bars and len(figure.labels) <= 8:
        for number, name in enumerate(figure.labels):
            x, _ = at(number + 0.5, 0)
            shown = name if len(name) <= 9 else name[:8] + "…"
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{html.escape(shown)}</text>')
    return "\n".join([*parts, "</svg>"])


def draw_picture(path: str, title: str, figures: Sequence[Figure]) -> None:
    """Draw them with matplotlib, as its format for the path's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = math.ceil(len(figures) / 2) or 1
    canvas, grid = pyplot.subplots(rows, 2, figsize=(12, 3.6 * rows), squeeze=False, layout="constrained")
    canvas.suptitle(title)
    for axes in grid.flat[len(figures) :]:
        axes.set_axis_off()
    for axes, figure in zip(grid.flat, figures, strict=False):
        axes.set_title(figure.title, fontsize=10)
        axes.set_xlabel(figure.x_title)
        axes.set_ylabel(figure.y_title)
        for number, series in enumerate(figure.series):
            xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
            if figure.labels:
                width = 0.8 / len(figure.series)
                axes.bar([x + number * width for x in xs], ys, width, label=series.name)
            else:
                axes.plot(xs, ys, label=series.name)
        if figure.labels:
            axes.set_xticks(range(len(figure.labels)), figure.labels, rotation=60, fontsize=7)
        if len(figure.series) > 1:
            axes.legend()
        axes.set_ylim(bottom=0)
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)
