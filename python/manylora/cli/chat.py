"""`manylora chat`: a conversation in the terminal, with the adapter that each turn names."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from typing import Any

from manylora.cli.conversation import Local, Messages, Remote, Speaker
from manylora.cli.local import add_engine_flags, asked
from manylora.exceptions import ManyLoRAError, ValidationError
from manylora.llm import LLM
from manylora.sampling_params import SamplingParams

COMMANDS = """\
/adapter NAME   who answers from now on; without a name, who may (the base is `base`, or the server's name for it)
/system TEXT    instruction for all turns; without a text, none
/set NAME=VALUE temperature, top_p, max_tokens, seed
/reset          forget the conversation
/help           this
/quit           end, as Ctrl-D does; Ctrl-C stops an answer
"""
EXAMPLES = f"""\
in the conversation:
{COMMANDS}
examples:
  manylora chat BASE --lora-modules sql=./sql support=./support --adapter sql
  manylora chat --url http://127.0.0.1:8000 --adapter support
  echo "Hello" | manylora chat BASE --temperature 0
"""
SETTINGS: dict[str, Any] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "chat",
        help="talk to the base and its adapters in the terminal",
        description="Talk to a base and its adapters: MODEL in this process, or a server by --url.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", metavar="URL", help="a server of OpenAI's kind, instead of MODEL")
    parser.add_argument("--api-key", metavar="KEY", help="its key (default: MANYLORA_API_KEY or OPENAI_API_KEY)")
    parser.add_argument("--adapter", metavar="NAME", help="who answers first (default: the base)")
    parser.add_argument("--system", metavar="TEXT", help="instruction for all turns")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=float, metavar="T", help="temperature (default: the model's)")
    add_engine_flags(parser, model_is_needed=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    if (arguments.model_tag is None) == (arguments.url is None):
        arguments.parser.error("give MODEL, or a server by --url")
    params: dict[str, Any] = {name: getattr(arguments, name, None) for name in ("max_tokens", "temperature")}
    params = {name: value for name, value in params.items() if value is not None}
    # Now, and not at the first turn.
    SamplingParams(**params)
    if arguments.url is not None:
        key = arguments.api_key or os.environ.get("MANYLORA_API_KEY") or os.environ.get("OPENAI_API_KEY")
        return Conversation(Remote(arguments.url, key), arguments.adapter, arguments.system, params).talk()
    engine = asked(arguments)
    with LLM.from_engine_args(engine.settings) as llm:
        engine.register(llm.llm_engine)
        return Conversation(Local(llm, engine), arguments.adapter, arguments.system, params).talk()


class Conversation:
    """What was said, and who answers next."""

    def __init__(self, speaker: Speaker, adapter: str | None, system: str | None, params: dict[str, Any]):
        self._speaker = speaker
        self._params = params
        self._system = system
        self._turns: Messages = []
        self._adapter = speaker.adapters()[0]
        if adapter is not None:
            self._choose(adapter)

    def talk(self) -> int:
        """Read turns until the input ends; the status is 1 if one that came through a pipe could not be answered."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            # Lines can be edited, and former ones found again.
            import readline  # noqa: F401

            print(f"{', '.join(self._speaker.adapters()[:20])}; /help says what else there is", file=sys.stderr)
        status = 0
        while True:
            try:
                line = input(f"{self._adapter}> " if is_terminal else "")
            except EOFError:
                return status
            except KeyboardInterrupt:
                print(file=sys.stderr)
                continue
            if line.strip() == "/quit":
                return status
            try:
                self._turn(line.strip())
            except ManyLoRAError as error:
                print(f"manylora: error: {error}", file=sys.stderr)
                status = 0 if is_terminal else 1

    def _turn(self, line: str) -> None:
        if not line:
            return
        if line.startswith("/"):
            command, _, rest = line[1:].partition(" ")
            self._command(command, rest.strip())
            return
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked_now = [*self._turns, {"role": "user", "content": line}]
        said = []
        try:
            with closing(self._speaker.answer([*system, *asked_now], self._adapter, self._params)) as answer:  # type: ignore[type-var]
                for piece in answer:
                    said.append(piece)
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(" [stopped]", end="", file=sys.stderr)
        finally:
            if said:
                print(flush=True)
        self._turns = [*asked_now, {"role": "assistant", "content": "".join(said)}]

    def _command(self, command: str, rest: str) -> None:
        match command:
            case "adapter":
                if rest:
                    self._choose(rest)
                else:
                    print("\n".join(self._speaker.adapters()), file=sys.stderr)
            case "system":
                self._system = rest or None
            case "reset":
                self._turns = []
            case "set":
                name, _, value = rest.partition("=")
                try:
                    self._params[name] = SETTINGS[name](value)
                except (KeyError, ValueError):
                    raise ManyLoRAError(f"/set takes NAME=NUMBER of {', '.join(SETTINGS)}, got `{rest}`") from None
            case "help":
                print(COMMANDS, end="", file=sys.stderr)
            case _:
                raise ManyLoRAError(f"there is no command /{command}; /help says which there are")

    def _choose(self, adapter: str) -> None:
        known = self._speaker.adapters()
        if adapter not in known:
            raise ValidationError(f"there is no adapter `{adapter}`; there are {', '.join(known[:20])}")
        self._adapter = adapter
