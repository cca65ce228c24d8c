"""`manylora sim`: how a fleet of adapters would run, without a card."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from manylora import _core, sim
from manylora.cli import sim_picture, sim_table, sim_traces
from manylora.cli.sim_flags import Range, add_flags, changes
from manylora.exceptions import ValidationError

EXAMPLES = """\
examples:
  manylora sim --model Llama-2-7b --gpu a100-80 --adapters 200 --rank 8 --rate 8 --popularity zipf:1
  manylora sim --config run.yaml --set seed=7 --plot run.html
  manylora sim --config run.yaml --sweep max_loras=1,2,4,8 --sweep rate=1:10:1 --plot sweep.svg
  manylora sim --config run.yaml --find-smallest max_cpu_loras=1:200 --such-that "ttft_p99 < 0.5"
  manylora sim --config run.yaml --find-rate 0.5:40
  manylora sim --config run.yaml --replicas 16 --router consistent_hashing
  manylora sim calibrate trace.jsonl -o cal.json         of an engine that ran with --record-trace
  manylora sim replay other.jsonl --calibration cal.json
  manylora sim --model SmolLM2-135M --gpu cpu --kv-cache-memory-bytes 2G --calibration cal.json --trace other.jsonl
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    cards, models = _core.planned_names()
    parser = commands.add_parser(
        "sim",
        help="say how fast it would be, without a card",
        description=(
            "Run the engine's own scheduler and adapter shelf under a virtual clock, with a model of what steps and "
            "loads take in place of the card, and say what throughput and latency a load would see. Sweeps and "
            "searches run it many times. What is assumed: docs/simulation.md."
        ),
        epilog=f"{EXAMPLES}\ncards: {', '.join(cards)}\nmodels: {', '.join(models)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    sim_traces.add_subcommands(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer; the status is 1 if what was searched for is nowhere."""
    if arguments.plot:
        sim_picture.check_path(arguments.plot)
        sim_picture.check_axes(arguments.sweep)
    config = _config(arguments)
    if arguments.show_config:
        print(json.dumps(config, indent=1))
        return 0
    wanted = [one for one in (arguments.find_smallest, arguments.find_largest, arguments.find_rate) if one]
    if len(wanted) + bool(arguments.sweep) > 1:
        raise ValidationError("one question at a time: --sweep, --find-smallest, --find-largest or --find-rate")
    names = [name for name, _ in arguments.sweep]
    if len(set(names)) < len(names):
        raise ValidationError(f"--sweep `{max(names, key=names.count)}`: it is swept twice")
    if arguments.such_that and not wanted:
        raise ValidationError("--such-that belongs to --find-smallest, --find-largest or --find-rate")
    with _Bar() as bar:
        if arguments.sweep:
            result: Any = sim.sweep(config, dict(arguments.sweep), progress=bar)
        elif wanted:
            (goal,) = wanted
            result = _find(config, goal, arguments, bar)
        else:
            result = sim.summary(config, progress=bar)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        shown = sim_table.sweep if arguments.sweep else sim_table.found if wanted else sim_table.report
        print(shown(result))
    if arguments.plot:
        drawn = sim_picture.found if wanted else sim_picture.sweep if arguments.sweep else sim_picture.report
        try:
            sim_picture.draw(Path(arguments.plot), _title(config), drawn(result))
        except OSError as error:
            raise ValidationError(f"the picture `{arguments.plot}` cannot be written: {error}") from error
    return 1 if wanted and result["value"] is None else 0


def _find(config: dict[str, Any], goal: Range, arguments: argparse.Namespace, bar: _Bar) -> dict[str, Any]:
    conditions = arguments.such_that or [f"slo_attainment >= {arguments.attainment:g}"]
    return sim.find(
        config,
        goal.parameter,
        goal.low,
        goal.high,
        conditions,
        largest=not arguments.find_smallest,
        tolerance=goal.tolerance,
        progress=bar,
    )


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the file's table with what the command line says in place, complete."""
    table = sim.load(arguments.config_file) if arguments.config_file else {}
    for name in ("model", "gpu"):
        given = getattr(arguments, name)
        if given is not None:
            table[name] = given
        elif name not in table:
            raise ValidationError(f"--{name} is needed, or a --config that names it")
    if arguments.workload is not None:
        table["workload"] = {arguments.workload: {"path": arguments.trace} if arguments.trace else {}}
    elif arguments.trace is not None:
        table["workload"] = {"trace": {"path": arguments.trace}}
    if arguments.calibration is not None:
        table["cost"] = {"calibrated": {"path": arguments.calibration}}
    changed = [(name, json.dumps(value)) for name, value in changes(arguments)]
    full: dict[str, Any] = json.loads(_core.simulated_config(json.dumps(table), changed))
    return full


def _title(config: dict[str, Any]) -> str:
    names = [one if isinstance(one, str) else one.get("name", "") for one in (config["model"], config["gpu"])]
    fleet = f"{config['replicas']} x {names[1]}" if config["replicas"] > 1 else names[1]
    return f"{names[0]} on {fleet}"


class _Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __enter__(self) -> _Bar:
        self._bar = tqdm(unit="request", disable=not sys.stderr.isatty(), leave=False, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)
