"""`manylora merge`: a base and adapters as one checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from manylora.flags import amount
from manylora.merging import DTYPES, SHARD_BYTES, merge

EXAMPLES = """\
examples:
  manylora merge BASE ./sql ./merged
  manylora merge BASE ./sql ./support ./merged --weights 0.7,0.3 --dtype bfloat16
  manylora merge model.Q4_K_M.gguf ./sql ./merged --dtype float16 --overwrite
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "merge",
        help="write a checkpoint that has adapters in its weights",
        description=(
            "Write a base with adapters in its weights, as a Hugging Face checkpoint that computes what the engine "
            "does with them beside the base. Several adapters are summed, each times its weight."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", help="local folder, GGUF file or hub id of the base")
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help="folder, hub id or URL of an adapter")
    parser.add_argument("output", metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="number format (default: the base's)")
    parser.add_argument(
        "--weights", type=_weights, metavar="W[,W...]", help="a factor for each adapter (default: 1 each)"
    )
    parser.add_argument(
        "--max-shard-size", type=_bytes, default=SHARD_BYTES, metavar="BYTES", help="of a file of weights (default: 5g)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there already")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of the base on the hub")
    parser.add_argument("--hf-token", metavar="TOKEN", help="token of the hub (default: the one that is logged in)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas between them are needed, got `{text}`") from None


def _bytes(text: str) -> int:
    value = amount(text)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise argparse.ArgumentTypeError(f"a positive number of bytes is needed, such as 5g, got `{text}`")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Merge, and say what came of it."""
    merged = merge(
        arguments.base,
        arguments.adapters,
        arguments.output,
        weights=arguments.weights,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        overwrite=arguments.overwrite,
        hf_token=arguments.hf_token,
        revision=arguments.revision,
        use_tqdm=sys.stderr.isatty(),
    )
    for note in merged.notes:
        print(note, file=sys.stderr)
    if arguments.json:
        print(json.dumps(merged.to_dict()))
    else:
        files = "one file" if merged.shards == 1 else f"{merged.shards} files"
        print(f"{merged.output}: {merged.bytes} bytes of {merged.dtype} in {files}; {merged.changed} tensors changed")
    return 0
