"""Which adapter each request names: the mixes that papers on serving many adapters measure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from manylora.exceptions import ValidationError

# What a mix takes after its colon: the value where none is given, and what it must be above.
_PARAMETERS = {"zipf": (1.0, 0.0), "power": (1.0, 0.0), "skewed": (1.5, 1.0)}
# vLLM's names of `--lora-assignment`.
_ALIASES = {"random": "uniform", "round-robin": "distinct"}
MIXES = ("uniform", "distinct", "identical", "skewed", "zipf", "power")


@dataclass(frozen=True)
class Popularity:
    """A mix of adapters.

    Attributes:
        mix: one of `MIXES`.
        parameter: its exponent or ratio; 0 where it has none.

    """

    mix: str
    parameter: float = 0.0

    @classmethod
    def read(cls, text: str) -> Popularity:
        """Read `uniform`, `zipf:1.1` and so on.

        Raises:
            ValidationError: there is no such mix, or its parameter is out of range.

        """
        mix, _, given = text.partition(":")
        mix = _ALIASES.get(mix, mix)
        if mix not in MIXES or (given and mix not in _PARAMETERS):
            raise ValidationError(
                f"`{text}` is no popularity; use uniform, distinct, identical, skewed, zipf:ALPHA or power:ALPHA"
            )
        if mix not in _PARAMETERS:
            return cls(mix)
        default, above = _PARAMETERS[mix]
        try:
            parameter = float(given) if given else default
        except ValueError:
            parameter = 0.0
        if not above < parameter < 100:
            raise ValidationError(f"`{text}`: what follows the colon must be a number above {above:g} and below 100")
        return cls(mix, parameter)

    def __str__(self) -> str:
        return f"{self.mix}:{self.parameter:g}" if self.mix in _PARAMETERS else self.mix


def choose(
    popularity: Popularity, adapters: Sequence[str], count: int, base_share: float, source: random.Random
) -> list[str | None]:
    """Return the adapter of each request; None is the base.

    `base_share` of the requests, at random places, go to the base, or all where there are no adapters. The others are
    dealt by the mix, the first adapter being the most popular:

    - `uniform`: each drawn alike; `zipf:A`: the k-th drawn with a weight of k^-A; `power:A`: the adapter number
      floor(n * U^(1/A)) for a uniform U (S-LoRA, where small A is skewed towards the first);
    - `distinct`: each in turn, so that neighbours never share one; `identical`: only the first;
    - `skewed`: groups of floor(1.5^k) requests for k = 0, 1, ... until there are enough (Punica), in random order.
    """
    bases = count if not adapters else round(base_share * count)
    chosen = _dealt(popularity, adapters, count - bases, source)
    places = set(source.sample(range(count), bases))
    remaining = iter(chosen)
    return [None if number in places else next(remaining) for number in range(count)]


def _dealt(popularity: Popularity, adapters: Sequence[str], count: int, source: random.Random) -> list[str]:
    number_of = len(adapters)
    match popularity.mix:
        case _ if count == 0:
            return []
        case "identical":
            return [adapters[0]] * count
        case "distinct":
            return [adapters[number % number_of] for number in range(count)]
        case "skewed":
            sizes = group_sizes(count, popularity.parameter)
            dealt = [adapters[group % number_of] for group, size in enumerate(sizes) for _ in range(size)]
            source.shuffle(dealt)
            return dealt
        case "power":
            exponent = 1 / popularity.parameter
            return [adapters[min(int(source.random() ** exponent * number_of), number_of - 1)] for _ in range(count)]
        case "zipf":
            weights = [rank**-popularity.parameter for rank in range(1, number_of + 1)]
            return source.choices(adapters, weights, k=count)
        case _:
            return source.choices(adapters, k=count)


def group_sizes(count: int, ratio: float) -> list[int]:
    """Return Punica's skewed groups of `count` requests, the largest first: floor(ratio^k), the last one cut short."""
    sizes: list[int] = []
    size, left = 1.0, count
    while left:
        sizes.append(min(int(size), left))
        left -= sizes[-1]
        size *= ratio
    return sorted(sizes, reverse=True)
