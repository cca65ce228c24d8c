"""`manylora plan`: what of a model, its adapters and its sequences fits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from manylora import _core, planning
from manylora.cli import plan_picture
from manylora.exceptions import ValidationError
from manylora.flags import add_flag, amount
from manylora.serve_arguments import BY_NAME

EXAMPLES = """\
examples:
  manylora plan --model Qwen2.5-7B-Instruct --gpu rtx4090 --adapters 30 --rank 16 --lengths 1024 4096
  manylora plan --model ./my-model/config.json --gpu a100-80 --adapters 2000 --rank 64 32 16 8 --max-lora-rank 64
  manylora plan --model Qwen2.5-0.5B-Instruct --gpu cpu --adapters 8 --target-modules all-linear --plot plan.svg
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    cards, models = _core.planned_names()
    parser = commands.add_parser(
        "plan",
        help="say what fits on a card, in bytes",
        description=(
            "Say what of a model, its adapters and its sequences fits on a card, or on this machine, without either: "
            "bytes are those that the engine would decide by."
        ),
        epilog=f"{EXAMPLES}\ncards: {', '.join(cards)}, cpu\nmodels: {', '.join(models)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("what is planned")
    group.add_argument(
        "--model", required=True, metavar="MODEL", help="a model's name, or the path of a checkpoint or a config.json"
    )
    group.add_argument("--gpu", required=True, metavar="CARD", help="a card's name, or cpu: this machine")
    group.add_argument("--adapters", type=_number, default=0, metavar="N", help="how many adapters (default: 0)")
    group.add_argument(
        "--rank",
        type=_number,
        nargs="+",
        default=[16],
        metavar="R",
        help="their rank, or several in turn (default: 16)",
    )
    group.add_argument(
        "--target-modules",
        nargs="+",
        default=list(planning.ATTENTION),
        metavar="MODULE",
        help="what they touch, or all-linear (default: q_proj k_proj v_proj o_proj)",
    )
    group.add_argument(
        "--lengths",
        type=_number,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="lengths of sequences, prompt and output (default: --max-model-len)",
    )
    group.add_argument(
        "--hot-adapters",
        type=_number,
        metavar="N",
        help="how many adapters requests ask for at a time (default: all of them)",
    )
    group.add_argument(
        "--memory-bytes", type=_number, metavar="BYTES", help="the device's memory, where it is another than is known"
    )
    engine = parser.add_argument_group("engine, as `manylora serve` has it")
    for name in planning.ENGINE_ARGUMENTS:
        add_flag(engine, BY_NAME[name])
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the answer as JSON")
    output.add_argument("--plot", metavar="FILE", help="draw the bytes, in .svg or .png (which needs matplotlib)")
    parser.set_defaults(run=run)


def _number(text: str) -> int:
    value = amount(text)
    if isinstance(value, bool) or not isinstance(value, int):
        raise argparse.ArgumentTypeError(f"an integer is needed, got `{text}`")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Answer."""
    if arguments.plot:
        plan_picture.check_path(arguments.plot)
    given = vars(arguments)
    engine = {name: given[name] for name in planning.ENGINE_ARGUMENTS if given[name] is not None}
    answer = planning.plan(
        arguments.model,
        gpu=arguments.gpu,
        adapters=arguments.adapters,
        rank=arguments.rank,
        target_modules=arguments.target_modules,
        lengths=arguments.lengths,
        hot_adapters=arguments.hot_adapters,
        memory_bytes=arguments.memory_bytes,
        **engine,
    )
    print(json.dumps(answer.to_dict(), indent=1) if arguments.json else plan_picture.text(answer))
    if arguments.plot:
        try:
            plan_picture.draw(Path(arguments.plot), answer)
        except OSError as error:
            raise ValidationError(f"the picture `{arguments.plot}` cannot be written: {error}") from error
    return 0
