"""`manylora sim calibrate` and `manylora sim replay`: what traces of a real engine are good for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from manylora import _core
from manylora.exceptions import ValidationError


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `sim`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    fit = commands.add_parser(
        "calibrate",
        help="fit a cost model to recorded traces",
        description=(
            "Fit what steps and loads take to traces that one engine recorded (--record-trace), and say how well it "
            "fits. How: docs/simulation-validation.md."
        ),
        epilog="examples:\n  manylora sim calibrate trace.jsonl other.jsonl -o calibration.json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fit.add_argument("traces", nargs="+", metavar="TRACE", help="traces of one engine")
    fit.add_argument("-o", "--output", required=True, metavar="FILE", help="where the calibration goes, as JSON")
    fit.set_defaults(run=calibrate)
    play = commands.add_parser(
        "replay",
        help="check that a recorded trace is decided the same way again",
        description=(
            "Give a new scheduler what a recorded one was given, and hold each of its decisions against the recorded "
            "one. With a calibration, simulate the same load as well, and put its latencies beside the measured ones."
        ),
        epilog=(
            "examples:\n  manylora sim replay trace.jsonl\n"
            "  manylora sim replay other.jsonl --calibration calibration.json --json\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    play.add_argument("trace", metavar="TRACE", help="a recorded trace")
    play.add_argument("--calibration", metavar="FILE", help="what `manylora sim calibrate` wrote")
    play.add_argument("--json", action="store_true", help="print the answer as JSON")
    play.set_defaults(run=replay)


def calibrate(arguments: argparse.Namespace) -> int:
    """Fit, write, and say how well it fits."""
    text = _core.calibrate_traces(arguments.traces)
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"the calibration `{arguments.output}` cannot be written: {error}") from error
    print(fit_table(json.loads(text)))
    return 0


def fit_table(calibration: dict[str, Any]) -> str:
    """Return how well a calibration fits, by kind of step and of load."""
    head = ("kind", "count", "seconds", "fitted/measured", "median deviation", "90 % within")
    rows: list[tuple[str, ...]] = [head]
    for what in ("steps", "loads"):
        for kind, one in calibration["fit"][what].items():
            deviations = (f"{one[name]:.1%}" for name in ("median_deviation", "p90_deviation"))
            shown = (f"{one['count']}", f"{one['seconds']:.3f}", f"{one['fitted_over_measured']:.3f}", *deviations)
            rows.append((f"{what}: {kind}", *shown))
    return _table(rows)


def replay(arguments: argparse.Namespace) -> int:
    """Replay, and say what that came to."""
    text = None
    if arguments.calibration:
        try:
            text = Path(arguments.calibration).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValidationError(f"the calibration `{arguments.calibration}` cannot be read: {error}") from error
    answer = json.loads(_core.replay_trace(arguments.trace, text))
    print(json.dumps(answer, indent=1) if arguments.json else replay_text(answer))
    return 0


def replay_text(answer: dict[str, Any]) -> str:
    """Return what a replay came to."""
    one = answer["replayed"]
    lines = [
        f"the same decisions: {one['steps']} steps, {one['requests']} requests, {one['hits']} hits, "
        f"{one['misses']} misses, {one['loads']} loads, {one['evictions']} evictions, {one['preemptions']} preemptions"
    ]
    if one["lost"]:
        lines.append(f"the trace lost {one['lost']} lines; what came after the first of them was not replayed")
    elif not one["closed"]:
        lines.append("the trace was not closed; it was replayed as far as it goes")
    if "simulated" in answer:
        if answer["left_out"]:
            lines.append(f"{answer['left_out']} requests were not simulated: they failed, or compose adapters")
        rows: list[tuple[str, ...]] = [("", "measured", "simulated", "simulated/measured")]
        for name, of in (("requests", "requests_per_second"), ("tokens", "tokens_per_second")):
            rows.append(_compared(f"{name} a second", *(answer[side][of] for side in ("measured", "simulated"))))
        for name in ("ttft", "e2e"):
            for part in ("p50", "p90", "p99"):
                both = (answer[side][name][part] for side in ("measured", "simulated"))
                rows.append(_compared(f"{name} {part} (s)", *both))
        rows.append(_compared("loads", *(answer[side]["loads"] for side in ("measured", "simulated"))))
        lines.append(_table(rows))
    return "\n".join(lines)


def _compared(name: str, measured: float, simulated: float) -> tuple[str, ...]:
    ratio = f"{simulated / measured:.3f}" if measured else "-"
    return (name, f"{measured:.4g}", f"{simulated:.4g}", ratio)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    first, *others = widths
    shown = (
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in shown)
