"""The machine's limits, which benches hold engines against."""

import math
from collections.abc import Callable

import pytest

from manylora import _core
from manylora.exceptions import ModelError, ValidationError

LIMITS = (_core.read_bandwidth, _core.arithmetic_peak)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.__name__)
def test_a_limit_is_a_positive_rate(limit: Callable[[int, float], float]) -> None:
    rate = limit(1, 0.01)
    assert math.isfinite(rate)
    assert rate > 0


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.__name__)
@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_seconds_must_be_a_time(limit: Callable[[int, float], float], seconds: float) -> None:
    with pytest.raises(ValidationError, match="seconds must be a time"):
        limit(1, seconds)


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_SIMD", "sse9")
    with pytest.raises(ModelError, match="sse9"):
        _core.arithmetic_peak(1, 0.01)
