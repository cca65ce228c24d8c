"""The command `manylora`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from manylora._core import __version__
from manylora.cli import bench, chat, demo, evaluate, generate, plan, serve, sim
from manylora.cli.log import shown_log
from manylora.exceptions import ManyLoRAError
from manylora.flags import FlagParser

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
  manylora plan --model Qwen2.5-7B-Instruct --gpu rtx4090 --adapters 30    what fits on a card, in bytes
  manylora sim --model Llama-2-7b --gpu a100-80 --adapters 200 --rate 8    and how fast it would be
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="manylora",
        description="Serve many LoRA adapters on one base model, a different one for each row of a batch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"manylora {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=FlagParser)
    demo.add_parser(commands)
    serve.add_parser(commands)
    chat.add_parser(commands)
    generate.add_parser(commands)
    evaluate.add_parser(commands)
    bench.add_parser(commands)
    plan.add_parser(commands)
    sim.add_parser(commands)
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0
    try:
        with shown_log():
            status: int = parsed.run(parsed)
    except ManyLoRAError as error:
        print(f"manylora: error: {error}", file=sys.stderr)
        return int(getattr(parsed, "status_of_error", 1))
    except KeyboardInterrupt:
        print("manylora: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`manylora demo | head`); there is nobody to tell.
        sys.stderr.close()
        return 141
    return status
