"""Command lines from a table of flags: both spellings, hints for unknown ones, and a YAML file of flags."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from manylora.arguments import Argument, Kind, Treatment
from manylora.engine_args import check
from manylora.exceptions import ValidationError
from manylora.serve_arguments import REPEATED, SHORT, Flag, Form, spelling

# Kinds whose values are text, even where they look like numbers.
_TEXTS = (Kind.TEXT, Kind.PATH, Kind.PATHS, Kind.NAMES, Kind.TOKEN, Kind.DTYPE, Kind.DEVICE)
# `32k` and `1.5g` count in thousands, `32K` and `2G` in powers of two.
_AMOUNT = re.compile(r"(\d+)(\.\d+)?([kmgt]|[KMGT])")


class OneLineParser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong: the usage of many flags would hide it."""

    def __init__(self, *arguments: Any, **options: Any):
        # A flag that is cut short may mean another one in the next version.
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


class FlagParser(OneLineParser):
    """A parser that takes `--a-b` and `--a_b` alike, names the nearest flag, and reads the file of `--config`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and fill in from the file what the command line does not say."""
        given = _with_dashes(sys.argv[1:] if args is None else args)
        self._check_before_commands(given)
        parsed, left = super().parse_known_args(given, namespace)
        unknown = next((item for item in left if item.startswith("--") and item != "--"), None)
        if unknown is not None:
            self.error(f"there is no flag {unknown.split('=')[0]}{self._hint(unknown.split('=')[0])}")
        if left and getattr(parsed, "model_tag", "") is None:
            # Python before 3.13 takes a positional that may be missing for missing when a flag comes first.
            parsed.model_tag = left.pop(0)
        if getattr(parsed, "config", None) is not None:
            self._fill_in(parsed, parsed.config)
        return parsed, left

    def _check_before_commands(self, given: Sequence[str]) -> None:
        """Name a flag that there is not, where the word behind it would be taken for a command."""
        actions = self._subparsers._group_actions if self._subparsers is not None else []
        commands = {name for action in actions for name in action.choices or ()}
        for item in itertools.takewhile(lambda item: item not in commands and item != "--", given):
            flag = item.split("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self.error(f"there is no flag {flag}{self._hint(flag)}")

    def _hint(self, flag: str) -> str:
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""

    def _fill_in(self, parsed: argparse.Namespace, file: str) -> None:
        def refuse(what: str) -> NoReturn:
            self.error(f"the configuration file `{file}` {what}")

        try:
            content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            refuse(f"cannot be read: {error}")
        if not isinstance(content, dict):
            refuse("must hold flags as keys, such as `max-lora-rank: 64`")
        for key, value in content.items():
            flag = spelling(str(key))
            action = self._option_string_actions.get(flag)
            if action is None or action.dest in ("config", "help"):
                refuse(f"has the key `{key}`, which is no flag that it can set{self._hint(flag)}")
            if value is None or getattr(parsed, action.dest, None) is not None:
                continue
            try:
                setattr(parsed, action.dest, _from_file(action, flag, value))
            except (ValueError, argparse.ArgumentTypeError) as error:
                refuse(f"has the key `{key}`, which {error}")


def _with_dashes(given: Iterable[str]) -> list[str]:
    listed = list(given)
    end = listed.index("--") if "--" in listed else len(listed)
    return [_with_dash(item) for item in listed[:end]] + listed[end:]


def _with_dash(item: str) -> str:
    flag, *value = item.split("=", 1)
    return "=".join([flag.replace("_", "-"), *value]) if re.fullmatch(r"--[A-Za-z][\w-]*", flag) else item


def _from_file(action: argparse.Action, flag: str, value: Any) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {value!r}")
        return value != flag.startswith("--no-")
    read: Callable[[str], Any] = action.type if callable(action.type) else str
    if action.nargs in ("+", "*"):
        return [read(_text(item)) for item in (value if isinstance(value, list) else [value])]
    return read(_text(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def add_flag(group: Any, flag: Flag) -> None:
    """Add a flag. None is what it has when it is not given; what has no effect or is refused is not shown."""
    argument = flag.argument
    names = [flag.spelling, *SHORT.get(flag.name, ())]
    shown = argparse.SUPPRESS if argument.treatment is not Treatment.HONOURED else _help(argument)
    options: dict[str, Any] = {"dest": flag.name, "default": None, "help": shown}
    metavar = "{" + ",".join(argument.choices) + "}" if argument.choices else flag.name.upper()
    match flag.form:
        case Form.SWITCH:
            # A short form has no `--no-`.
            group.add_argument(flag.spelling, action=argparse.BooleanOptionalAction, **options)
            if names[1:]:
                group.add_argument(*names[1:], action="store_true", **(options | {"help": argparse.SUPPRESS}))
        case Form.LIST:
            action = "extend" if flag.name in REPEATED else "store"
            group.add_argument(*names, nargs="+", action=action, type=_item(argument), metavar=metavar, **options)
        case Form.OPTIONAL:
            group.add_argument(*names, nargs="?", const=True, metavar=metavar, **options)
        case Form.VALUE:
            group.add_argument(*names, type=reader(argument), metavar=metavar, **options)


def _help(argument: Argument) -> str:
    default = "" if argument.default in (None, False) else f" (default: {argument.default})"
    return (argument.note + default).replace("%", "%%")


def _item(argument: Argument) -> Callable[[str], Any]:
    return str if argument.treatment is Treatment.HONOURED else plain


def reader(argument: Argument) -> Callable[[str], Any]:
    """Return what reads the value of an argument from text, and checks it if it is honoured."""
    if argument.treatment is not Treatment.HONOURED:
        return plain

    def read(text: str) -> Any:
        value = text if argument.kind in _TEXTS else amount(text)
        if argument.is_default(value):
            return value
        try:
            return check(argument, value)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def plain(text: str) -> Any:
    """Read a number or JSON where it is one, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def amount(text: str) -> Any:
    """Read a number, or one with a unit: `32k` is 32000, `32K` is 32768; what is none is returned as it is."""
    found = _AMOUNT.fullmatch(text)
    if found is None or (found[2] and found[3].isupper()):
        return plain(text)
    power = "kmgt".index(found[3].lower()) + 1
    if found[3].isupper():
        return int(found[1]) * 1024**power
    # Exact, where a float may fall short by one.
    fraction = (found[2] or ".")[1:]
    return int(found[1] + fraction) * 1000**power // 10 ** len(fraction)
