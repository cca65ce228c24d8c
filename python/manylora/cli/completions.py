"""`manylora completions`: what shells complete, made from the parsers of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from manylora.cli import completion_scripts

EXAMPLES = """\
examples:
  manylora completions bash > ~/.local/share/bash-completion/completions/manylora
  manylora completions zsh > ~/.zfunc/_manylora
  manylora completions fish > ~/.config/fish/completions/manylora.fish
  manylora completions bash
"""
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Option:
    """A flag, in all its spellings.

    Attributes:
        names: `-o`, `--output`.
        takes_value: whether a value follows.
        choices: the values there are; none = anything, files among it.
        help: what it means, in one line.

    """

    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    help: str


@dataclass
class Command:
    """A command, or the program itself.

    Attributes:
        path: its words: none, `serve`, `bench serve`.
        help: what it does, in one line.
        options: its flags.
        commands: the commands below it, by name.
        choices: what its arguments can be, where that is known.

    """

    path: tuple[str, ...]
    help: str
    options: list[Option] = field(default_factory=list)
    commands: dict[str, Command] = field(default_factory=dict)
    choices: tuple[str, ...] = ()

    def walk(self) -> Iterator[Command]:
        """Yield it and all below it."""
        yield self
        for command in self.commands.values():
            yield from command.walk()


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "completions",
        help="completions for bash, zsh or fish",
        description="Print what a shell needs to complete commands, flags and their values.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from manylora.cli import build_parser

    program = described(build_parser())
    scripts = {"bash": completion_scripts.bash, "zsh": completion_scripts.zsh, "fish": completion_scripts.fish}
    print(scripts[arguments.shell](program), end="")
    return 0


def described(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), text: str = "") -> Command:
    """Return what a parser takes."""
    command = Command(path, text)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            command.commands = {
                name: described(below, (*path, name), texts.get(name, "")) for name, below in action.choices.items()
            }
        elif action.option_strings:
            # What is not in the help has no effect, or is refused.
            if action.help is not argparse.SUPPRESS:
                command.options.append(_option(action))
        elif action.choices:
            command.choices = tuple(map(str, action.choices))
    return command


def _option(action: argparse.Action) -> Option:
    choices = tuple(map(str, action.choices)) if action.choices else _named(action.metavar)
    # Of one line, and as far as its first part goes.
    text = (
        " ".join((action.help or "").replace("%%", "%").split())
        .partition(";")[0]
        .removesuffix(" (default: %(default)s)")
    )
    return Option(tuple(action.option_strings), action.nargs != 0, choices, text)


def _named(metavar: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the choices that a metavar such as `{auto,cpu}` lists."""
    if isinstance(metavar, str) and metavar.startswith("{") and metavar.endswith("}"):
        return tuple(metavar[1:-1].split(","))
    return ()
