"""What requests ask for: prompts of random tokens, or those of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.exceptions import ValidationError

# Common words: most tokenizers have them as one token each.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years much where your way down
should because long each just state those people too mr how little good world make very year still see work life
such take while under last never old great same came house use during without again place around however home
small found part school every
"""
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: each between `low` and `high`, both of them possible and all alike."""

    low: int
    high: int

    @classmethod
    def read(cls, text: str) -> Lengths:
        """Read `128` or `64:512`.

        Raises:
            ValidationError: it is neither, or below 1.

        """
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ValidationError(f"`{text}` is no length; use a number such as 128, or a range such as 64:512")
        return lengths

    def around(self, ratio: float) -> Lengths:
        """Return the range of vLLM's `--random-range-ratio` around a length.

        Raises:
            ValidationError: this is a range already, or the ratio is not in [0, 1).

        """
        if not 0 <= ratio < 1 or (ratio and self.low != self.high):
            raise ValidationError(f"a range ratio of {ratio:g} needs one length, and must be from 0 to below 1")
        return Lengths(max(1, int(self.low * (1 - ratio))), max(1, int(self.high * (1 + ratio)))) if ratio else self

    def draw(self, source: random.Random) -> int:
        """Return one of them."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Prompt:
    """What a request asks.

    Attributes:
        content: text, tokens, or the messages of a chat.
        input_len: its tokens; 0 where only the server knows.
        output_len: the longest answer, in tokens.
        model: what it must be sent to; None where that is drawn.

    """

    content: str | list[int] | list[dict[str, Any]]
    input_len: int
    output_len: int
    model: str | None = None


def random_prompts(
    count: int, inputs: Lengths, outputs: Lengths, tokens: Sequence[int] | None, source: random.Random
) -> list[Prompt]:
    """Make prompts without a common beginning: of `tokens`, or of so many words where they are not known."""
    prompts = []
    for _ in range(count):
        input_len, output_len = inputs.draw(source), outputs.draw(source)
        if tokens:
            prompts.append(Prompt(source.choices(tokens, k=input_len), input_len, output_len))
        else:
            prompts.append(Prompt(" ".join(source.choices(WORDS, k=input_len)), 0, output_len))
    return prompts


def dataset_prompts(path: Path, count: int, outputs: Lengths, source: random.Random, shuffle: bool) -> list[Prompt]:
    """Read prompts from lines of JSON, in random order, again from the first when there are fewer than `count`.

    A line has `prompt` (text, or token ids) or `messages`, and may have `output_tokens` and `model`.

    Raises:
        ValidationError: the file cannot be read, or a line is something else.

    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"the dataset `{path}` cannot be read: {error}") from error
    if not lines:
        raise ValidationError(f"the dataset `{path}` has no lines")
    if shuffle:
        source.shuffle(lines)
    chosen: Iterable[tuple[int, str]] = (lines[number % len(lines)] for number in range(count))
    return [_read_line(path, number, line, outputs, source) for number, line in chosen]


def _read_line(path: Path, number: int, line: str, outputs: Lengths, source: random.Random) -> Prompt:
    def refuse(what: str) -> ValidationError:
        return ValidationError(f"line {number} of the dataset `{path}` {what}")

    try:
        entry = json.loads(line)
    except ValueError as error:
        raise refuse(f"is no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise refuse("must be a JSON object")
    content = entry.get("prompt", entry.get("messages"))
    if not isinstance(content, str | list) or not content:
        raise refuse("needs `prompt` (text or token ids) or `messages`")
    length = entry.get("output_tokens")
    if length is None:
        length = outputs.draw(source)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise refuse(f"has `output_tokens` of {length!r}; it must be a number from 1")
    model = entry.get("model")
    if model is not None and not isinstance(model, str):
        raise refuse(f"has a `model` of {model!r}; it must be a name")
    tokens = len(content) if isinstance(content, list) and isinstance(content[0], int) else 0
    return Prompt(content, tokens, length, model)
