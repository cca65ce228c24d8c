"""`manylora inspect`: the load report of an adapter, without serving it, and a closer look at its factors."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from manylora.inspection import MAX_RANK, inspect_adapter

EXAMPLES = """\
The rank of B A is told in two ways. `rank of BA` counts singular values above max(input, output) x 1.19e-7 (float32's
epsilon) of the largest. `entropy rank` is exp of the entropy of the singular values as shares of their sum: how many of
equal size would be as spread out.

status: 0 where the adapter would be served; 1 where it is refused; 2 where there is no adapter or no base to look at

examples:
  manylora inspect ./sql --base BASE
  manylora inspect ./sql --base BASE --max-lora-rank 16 --json
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "inspect",
        help="what of an adapter would be applied, and what not and why",
        description="Say what of an adapter would be applied to a base, and what not and why, without serving it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="folder, hub id or URL of the adapter")
    parser.add_argument("--base", required=True, metavar="BASE", help="local folder, GGUF file or hub id of the base")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32", "float16"),
        default="auto",
        help="number format of the engine (default: auto)",
    )
    parser.add_argument(
        "--max-lora-rank",
        type=_rank,
        default=MAX_RANK,
        metavar="R",
        help=f"largest rank that is accepted (default: {MAX_RANK}, the largest there is; a server has 16)",
    )
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of the base on the hub")
    parser.add_argument("--hf-token", metavar="TOKEN", help="token of the hub (default: the one that is logged in)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_RANK:
        raise argparse.ArgumentTypeError(f"a rank is a number from 1 to {MAX_RANK}, got `{text}`")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; the status is 1 if the adapter is refused."""
    found = inspect_adapter(
        arguments.adapter,
        arguments.base,
        dtype=arguments.dtype,
        max_lora_rank=arguments.max_lora_rank,
        hf_token=arguments.hf_token,
        revision=arguments.revision,
    )
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(lines(found)))
    return 0 if found["accepted"] else 1


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer as people read it."""
    report = found["report"]
    yield f"adapter `{report['adapter']}` in {report['path']}: {'accepted' if found['accepted'] else 'refused'}"
    if found["reason"]:
        yield f"reason          {found['reason']}"
    if report["version"]:
        yield f"version         {report['version']}"
    if report["base_model"]:
        yield f"trained on      {report['base_model']}"
    if found["accepted"]:
        scaling = "alpha / sqrt(rank), rank-stabilized" if found["rank_stabilized"] else "alpha / rank"
        yield f"scale           {scaling}"
        yield f"target modules  {', '.join(sorted(found['target_modules']))}"
        yield (
            f"size            {found['parameters']} parameters: {found['bytes']} bytes on the shelf "
            f"({found['dtype']}), {found['card_bytes']} on a card"
        )
    counts = ", ".join(f"{len(report[kind])} {kind}" for kind in ("matched", "ignored", "refused"))
    yield f"keys            {counts}"
    for warning in report["warnings"]:
        yield f"warning         {warning}"
    if found["modules"]:
        yield ""
        yield from _table(found["modules"])
    for kind in ("ignored", "refused"):
        if report[kind]:
            yield ""
            yield f"{kind}:"
            for key in sorted(report[kind], key=_natural):
                yield f"  {key}"
                yield f"    {report[kind][key]}"


def _table(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    head = ("module", "rank", "alpha", "scale", "shape", "||scale BA||", "largest value", "rank of BA", "entropy rank")
    rows = [head]
    for name in sorted(modules, key=_natural):
        one = modules[name]
        rows.append(
            (
                name,
                f"{one['rank']}",
                f"{one['alpha']:g}",
                f"{one['scale']:.6g}",
                f"{one['output']} x {one['input']}",
                f"{one['effect']:.4g}",
                f"{max(one['singular_values'], default=0.0):.4g}",
                f"{one['numerical_rank']}",
                f"{one['entropy_rank']:.2f}",
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _natural(key: str) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]
