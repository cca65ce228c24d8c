"""Rows of JSON in files: read with errors that name the line, written so that a run which ended early goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from manylora.exceptions import ValidationError


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with words for where it is; empty lines are passed over.

    Raises:
        ValidationError: the file cannot be read, or a line is not a JSON object.

    """
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"`{path}`, line {number}"
                    yield where, _object(where, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"`{path}` cannot be read: {error}") from error


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValidationError(f"{where} must be a JSON object, got {type(row).__name__}")
    return row


def take(row: dict[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Take a field out of a row; None if it is not there.

    Raises:
        ValidationError: it is of another kind.

    """
    value = row.pop(name, None)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join({str: "text", list: "a list", int: "an integer", float: "a number"}[one] for one in kinds)
        raise ValidationError(f"{where}: `{name}` must be {names}, got {value!r}")
    return value


# Characters that JSON may have in a text and that some readers take for the end of a line.
_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"})

_OTHERS = "give another file, or --overwrite"


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False).translate(_ENDS) + "\n"


class RowFile:
    """A file of rows that grows. What an earlier run wrote stays; a line that it did not finish does not.

    Args:
        path: the file.
        first: the field that each of its rows begins with.
        is_own: whether a row is of the kind that is written here. A file that has others is not touched.
        overwrite: begin anew, whatever is there, when :meth:`begin` is called.

    Raises:
        ValidationError: the file cannot be written, or holds something else.

    """

    def __init__(self, path: str, first: str, is_own: Callable[[dict[str, Any]], bool], *, overwrite: bool):
        self.path = Path(path).expanduser()
        self.rows: list[dict[str, Any]] = []
        self._first, self._is_own = first, is_own
        try:
            self._made = not self.path.exists()
            whole = 0 if overwrite or self._made else self._read()
            self._file: TextIO = self.path.open("a", encoding="utf-8")
            self._anew = overwrite
            if not overwrite:
                self._file.truncate(whole)
        except OSError as error:
            raise ValidationError(f"`{path}` cannot be written: {error}") from error

    def _read(self) -> int:
        """Read the rows that are whole; return how many bytes they take."""
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"`{self.path}`, line {number}"
                if not line.endswith(b"\n"):
                    self._check_unfinished(where, line)
                    break
                if line.strip():
                    self.rows.append(self._own(where, line))
                whole += len(line)
        return whole

    def _own(self, where: str, line: bytes) -> dict[str, Any]:
        try:
            row = _object(where, line.decode())
        except UnicodeDecodeError:
            raise ValidationError(f"{where} is no text: {_OTHERS}") from None
        except ValidationError as error:
            raise ValidationError(f"{error}: {_OTHERS}") from None
        if not self._is_own(row):
            raise ValidationError(f"{where} was not written by this command: {_OTHERS}")
        return row

    def _check_unfinished(self, where: str, line: bytes) -> None:
        """Refuse a last line without its end that is not the beginning of a row of ours: it would be thrown away."""
        begins = json.dumps({self._first: 0}).removesuffix("0}").encode()
        try:
            json.loads(line)
        except ValueError:
            if not line.startswith(begins[: len(line)]):
                raise ValidationError(f"{where} was not written by this command: {_OTHERS}") from None
        else:
            self._own(where, line)

    def begin(self) -> None:
        """Clear what is to be overwritten: now that nothing stands in the way of other rows."""
        if self._anew:
            self._file.truncate(0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row; it is there whatever happens next."""
        self._file.write(_line(row))
        self._file.flush()

    def replace(self, rows: list[dict[str, Any]]) -> None:
        """Keep these rows and no others: all of them or, if it is interrupted, what was there."""
        spare = self.path.with_name(self.path.name + ".part")
        with spare.open("w", encoding="utf-8") as file:
            file.writelines(map(_line, rows))
        self._file.close()
        os.replace(spare, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close it. A file that was not there before and got no row is not left behind."""
        self._file.close()
        if self._made and self.path.stat().st_size == 0:
            self.path.unlink()
