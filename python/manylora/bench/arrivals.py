"""When requests are due: fixed before the first is sent, so that a slow server cannot slow the load down."""

from __future__ import annotations

import itertools
import math
import random


def due_times(count: int, rate: float, burstiness: float, source: random.Random) -> list[float]:
    """Return when each request is due, in seconds after the start.

    The gaps are Gamma distributed with the shape `burstiness` and the mean 1 / `rate`, as vLLM's load generator has
    them: 1 is a Poisson process, less comes in bursts, more is steadier. As there, times are scaled so that the last is
    due at `count` / `rate`: the rate that was asked for is the rate of the run, whatever the seed. An infinite rate is
    all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = list(itertools.accumulate(source.gammavariate(burstiness, 1.0) for _ in range(count)))
    if not times or times[-1] == 0:
        return times
    scale = count / rate / times[-1]
    return [time * scale for time in times]
