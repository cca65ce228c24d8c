"""The command `manylora`."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence

from manylora._core import __version__
from manylora.cli import bench, chat, completions, demo, doctor, evaluate, generate, inspect, merge, plan, serve, sim
from manylora.cli.log import shown_log
from manylora.exceptions import ManyLoRAError
from manylora.flags import FlagParser, OneLineParser

EXAMPLES = """\
examples:
  manylora demo                          one mixed batch of three adapters and the base on SmolLM2-135M
  manylora demo --model ~/smollm2.gguf   the same on a file that is there already
  manylora demo --max-tokens 64 --dtype float32 --threads 1
  manylora serve BASE --lora-modules sql=./sql support=./support
  manylora bench serve --request-rate 4        time every token of 1000 requests to that server
  manylora chat BASE --lora-modules sql=./sql  talk to them here; --url talks to a server
  manylora generate BASE --lora-modules sql=./sql --input prompts.jsonl --output answers.jsonl
  manylora eval BASE --lora-modules sql=./sql --data texts.jsonl         perplexity of the base and each adapter
  manylora inspect ./sql --base BASE     what of an adapter would be applied, and what not and why
  manylora merge BASE ./sql ./merged     a checkpoint that has the adapter in its weights
  manylora plan --model Qwen2.5-7B-Instruct --gpu rtx4090 --adapters 30    what fits on a card, in bytes
  manylora sim --model Llama-2-7b --gpu a100-80 --adapters 200 --rate 8    and how fast it would be
  manylora doctor                        what there is on this machine: for a report of a mistake
  manylora completions bash              completions for a shell

status: 0; 2 where what was given cannot be used (flags, files, models, adapters, ports); 1 where what was asked for
began and failed, or some of it did; 130 after Ctrl-C
"""
COMMANDS = (demo, serve, chat, generate, evaluate, inspect, merge, bench, plan, sim, doctor, completions)
# What the system says where a path that was given is to blame.
_WRONG_PATHS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG, errno.EINVAL,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = OneLineParser(
        prog="manylora",
        description="Serve many LoRA adapters on one base model, a different one for each row of a batch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"manylora {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=FlagParser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0
    try:
        with shown_log():
            status: int = parsed.run(parsed)
    except ManyLoRAError as error:
        return _failed(str(error), error.exit_status)
    except RecursionError:
        return _failed("what was given is nested too deeply to be read", 2)
    except KeyboardInterrupt:
        print("manylora: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`manylora demo | head`); there is nobody to tell.
        sys.stderr.close()
        return 141
    except OSError as error:
        return _failed(str(error), 2 if error.filename is not None and error.errno in _WRONG_PATHS else 1)
    return status


def _failed(message: str, status: int) -> int:
    """Say in one line what is wrong."""
    print(f"manylora: error: {' '.join(line.strip() for line in message.splitlines())}", file=sys.stderr)
    return status
