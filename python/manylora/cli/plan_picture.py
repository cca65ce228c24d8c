"""A plan as a picture: a bar of bytes in the terminal, or drawn as SVG or PNG."""

from __future__ import annotations

import html
import textwrap
from pathlib import Path

from manylora import picture_path
from manylora.planning import Plan

_WIDTH = 64
# Part, what it is called, its letter in the terminal, its colour.
_PARTS = (
    ("driver", "driver", ".", "#9aa5b1"),
    ("base", "base weights", "#", "#1b6ca8"),
    ("workspace", "workspace", "w", "#e0a030"),
    ("adapters", "adapters", "A", "#d1495b"),
    ("kv_blocks", "KV blocks", "=", "#3c8d4a"),
    ("rest", "rest", " ", "#e8e8e8"),
    ("unused", "left to others", " ", "#ffffff"),
)


def check_path(path: str) -> None:
    """Check, before anything is planned, that the picture can be drawn.

    Raises:
        ValidationError: it has another ending, its folder is not there, or what draws PNG is not installed.

    """
    picture_path.check("--plot", path, ".svg", ".png")


def amount(count: int) -> str:
    """Return bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _parts(plan: Plan) -> list[tuple[str, int, str, str]]:
    sizes = [(title, int(getattr(plan.bytes, part)), letter, colour) for part, title, letter, colour in _PARTS]
    return [part for part in sizes if part[1]]


def text(plan: Plan) -> str:
    """Return the answer for the terminal."""
    return "\n".join([*_bar(plan), "", *_fleet(plan), "", *_sequences(plan), "", *_comparison(plan), *_remarks(plan)])


def _bar(plan: Plan) -> list[str]:
    parts = _parts(plan)
    # Everything that is there gets a column, and the largest gives up what rounding adds.
    widths = [max(1, round(_WIDTH * size / plan.bytes.total)) for _, size, _, _ in parts]
    widths[widths.index(max(widths))] += _WIDTH - sum(widths)
    bar = "".join(letter * width for (_, _, letter, _), width in zip(parts, widths, strict=True))
    lines = [
        f"{plan.model} ({plan.parameters / 1e9:.2f} G parameters, {plan.dtype}) on {plan.device}, "
        f"{amount(plan.bytes.total)}",
        "",
        f"[{bar}]",
    ]
    for title, size, letter, _ in parts:
        lines.append(f"  {letter} {title:15}{amount(size):>11}  {100 * size / plan.bytes.total:5.1f} %")
    return lines


def _fleet(plan: Plan) -> list[str]:
    if not plan.fleet:
        return [f"no adapters; {amount(plan.adapter_room)} could be theirs"]
    lines = ["adapters      rank   each         all          resident  modules"]
    for group in plan.fleet:
        lines.append(
            f"{group.count:<14}{group.rank:<7}{amount(group.bytes):<13}{amount(group.count * group.bytes):<13}"
            f"{group.resident:<10}{' '.join(group.target_modules)}"
        )
    lines.append(f"room for {plan.most_adapters} like the first ({amount(plan.adapter_room)})")
    return lines


def _sequences(plan: Plan) -> list[str]:
    lines = ["tokens        each         fit     without adapters  run at a time"]
    for one in plan.sequences:
        lines.append(f"{one.tokens:<14}{amount(one.bytes):<13}{one.fit:<8}{one.fit_without_adapters:<18}{one.running}")
    return lines


def _comparison(plan: Plan) -> list[str]:
    lines = []
    if plan.modules:
        first = plan.modules[0]
        lines.append(
            f"one {first.shape[0]} x {first.shape[1]} matrix ({first.module}): {first.adapter_parameters:,} of "
            f"{first.base_parameters:,} parameters, {first.ratio:.0f} x fewer"
        )
    if plan.reservation is not None:
        one = plan.reservation
        lines.append(
            f"reserved by max_lora_rank {one.max_lora_rank} for {one.slots} adapters, as other engines do: "
            f"{amount(one.reserved_bytes)}, of which {amount(one.wasted_bytes)} wasted "
            f"({one.lost_sequences} sequences of {plan.sequences[0].tokens} tokens); "
            f"here {amount(one.charged_here_bytes)}"
            + (f", and {amount(one.workspace_here_bytes)} of workspace" if one.workspace_here_bytes else "")
        )
    if plan.full_copies.count:
        copies = plan.full_copies
        fits = (
            "as weights alone, all fit" if copies.fit >= copies.count else f"as weights alone, {copies.fit} would fit"
        )
        lines.append(f"{copies.count} full fine-tunes: {amount(copies.bytes)}; {fits}")
    return lines


def _remarks(plan: Plan) -> list[str]:
    remarks = [f"note: {line}" for line in plan.notes]
    if plan.quantization is not None:
        remarks.append(f"note: {plan.quantization.note}")
    remarks += [f"warning: {line}" for line in plan.warnings]
    return ["", *(line for remark in remarks for line in textwrap.wrap(remark, 100, subsequent_indent="  "))]


def draw(path: Path, plan: Plan) -> None:
    """Draw the bytes, in the format of the path's ending.

    Raises:
        OSError: the file cannot be written.

    """
    if path.suffix.lower() == ".png":
        _draw_png(path, plan)
    else:
        path.write_text(svg(plan), encoding="utf-8")


def _title(plan: Plan) -> str:
    return f"{plan.model} with {sum(group.count for group in plan.fleet)} adapters on {plan.device}"


def svg(plan: Plan) -> str:
    """Return the picture as SVG."""
    width, left, top, height = 720, 20, 44, 56
    scale = (width - 2 * left) / plan.bytes.total
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 260" width="{width}" role="img" '
        'font-family="system-ui,sans-serif" font-size="12">',
        f'<rect width="{width}" height="260" fill="#ffffff"/>',
        f'<text x="{left}" y="26" font-size="15" font-weight="600">{html.escape(_title(plan))}</text>',
    ]
    x = float(left)
    for number, (title, size, _, colour) in enumerate(_parts(plan)):
        label = html.escape(f"{title}: {amount(size)}")
        lines.append(
            f'<rect x="{x:.2f}" y="{top}" width="{size * scale:.2f}" height="{height}" fill="{colour}" stroke="#555" '
            f'stroke-width="0.5"><title>{label}</title></rect>'
        )
        x += size * scale
        column, row = number % 2, number // 2
        at_x, at_y = left + 340 * column, top + height + 30 + 24 * row
        lines.append(f'<rect x="{at_x}" y="{at_y - 11}" width="13" height="13" fill="{colour}" stroke="#555"/>')
        lines.append(f'<text x="{at_x + 20}" y="{at_y}">{label} ({100 * size / plan.bytes.total:.1f} %)</text>')
    one = plan.sequences[0]
    lines.append(f'<text x="{left}" y="246">{one.fit} sequences of {one.tokens} tokens fit beside the adapters</text>')
    return "\n".join([*lines, "</svg>", ""])


def _draw_png(path: Path, plan: Plan) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(9, 3), layout="constrained")
    start = 0.0
    for title, size, _, colour in _parts(plan):
        width = size / 1e9
        axes.barh([0], [width], left=[start], color=colour, edgecolor="#555555", label=f"{title}: {amount(size)}")
        start += width
    axes.set_title(_title(plan))
    axes.set_xlabel("GB")
    axes.set_yticks([])
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)
