"""`manylora.sim`: how a fleet would run, by the engine's own scheduler under a virtual clock.

`run(config)` is one run, `sweep(config, ...)` many with parameters changed, `find(config, ...)` looks for the value of
one parameter at which something begins to hold. A configuration is a dictionary, or the path of a YAML or JSON file;
what it may hold is in docs/simulation.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import yaml

from manylora import _core
from manylora.exceptions import ValidationError

if TYPE_CHECKING:
    import numpy

Config = Union[Mapping[str, Any], str, "PathLike[str]"]
Progress = Callable[[int, int], object]

__all__ = ["find", "load", "run", "summary", "sweep"]


def load(config: Config) -> dict[str, Any]:
    """Return a configuration as a dictionary.

    Raises:
        ValidationError: the file cannot be read, or holds no table.

    """
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config).expanduser()
    try:
        # JSON is YAML, too.
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValidationError(f"config `{path}` cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValidationError(f"config `{path}` must hold a table, such as `model: Llama-2-7b`")
    return content


def _text(config: Config) -> str:
    table = load(config)
    try:
        return json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"config holds what is neither number, text, list nor table: {error}") from error


def run(config: Config, *, progress: Progress | None = None) -> dict[str, Any]:
    """Run a configuration.

    Args:
        config: what is run.
        progress: is called now and then with the requests that are done, and all.

    Returns:
        `requests`: arrays with a place for each request, in the order of arrival: `arrival`, `admitted`, `first_token`,
        `end` (float64, seconds; NaN where there was none), `adapter` (-1 is the base), `replica`, `prompt_tokens`,
        `output_tokens`, `cached_tokens`, `preemptions`, `failed` (int64).
        `adapters`: arrays with a place for each adapter that had requests: `adapter` (-1 is the base), `completed`,
        `failed`, `output_tokens`, `mean_ttft` (seconds), `mean_rate` (tokens a second of a request), and `name` where a
        trace names them.
        `replicas`: arrays with a place for each replica.
        `summary`: everything else, as `summary(config)` returns it.

    Raises:
        ValidationError: a field is wrong, or numpy is not installed; the message names it.
        KeyboardInterrupt: Ctrl-C; the run ends at once.

    """
    try:
        import numpy
    except ImportError:
        raise ValidationError("manylora.sim.run returns numpy's arrays: `pip install manylora[sim]`") from None
    report, columns = _core.simulate(_text(config), True, progress)
    summed = json.loads(report)
    requests = {name: numpy.frombuffer(content, dtype=dtype) for name, dtype, content in columns}
    adapters: list[dict[str, Any]] = summed.pop("adapters")
    for row in adapters:
        row["adapter"] = -1 if row["adapter"] is None else row["adapter"]
    names = [row.pop("name") for row in adapters]
    result = {
        "requests": requests,
        "adapters": _columns(adapters, ("adapter", "completed", "failed", "output_tokens", "mean_ttft", "mean_rate")),
        "replicas": _columns(summed.pop("replicas")),
        "summary": summed,
    }
    if any(name is not None for name in names):
        result["adapters"]["name"] = numpy.array([name or "" for name in names])
    return result


def _columns(rows: list[dict[str, Any]], names: Sequence[str] = ()) -> dict[str, numpy.ndarray[Any, Any]]:
    import numpy

    return {name: numpy.array([row[name] for row in rows]) for name in (rows[0] if rows else names)}


def summary(config: Config, *, progress: Progress | None = None) -> dict[str, Any]:
    """Run a configuration and return its report: plain numbers, lists and dictionaries, no arrays.

    Raises:
        ValidationError: a field is wrong; the message names it.

    """
    report: dict[str, Any] = json.loads(_core.simulate(_text(config), False, progress)[0])
    return report


def sweep(
    config: Config, parameters: Mapping[str, Sequence[Any]], *, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Run every combination of parameters' values, on all cores.

    Args:
        config: what is run.
        parameters: values by name: `max_loras`, or the whole path (`engine.max_loras`). The last one changes fastest.
        progress: as for `run`.

    Returns:
        A row for each run: `parameters` and `metrics`, both by name.

    Raises:
        ValidationError: a parameter or a value is wrong; the message names it.

    """
    axes = [(str(name), json.dumps(list(values))) for name, values in parameters.items()]
    rows: list[dict[str, Any]] = json.loads(_core.simulate_sweep(_text(config), axes, progress))
    return rows


def find(
    config: Config,
    parameter: str,
    low: float,
    high: float,
    conditions: str | Sequence[str],
    *,
    largest: bool = False,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find the smallest (or the largest) value of a parameter at which all conditions hold, by bisection.

    Args:
        config: what is run.
        parameter: its name, as for `sweep`.
        low: the least value that is tried.
        high: the most.
        conditions: a metric, one of `<`, `<=`, `>`, `>=`, and a number: `ttft_p99 < 0.5`.
        largest: look for the largest value instead.
        tolerance: how near, as a share of the value; None = to the next whole number, or one percent.
        progress: as for `run`.

    Returns:
        `value` (None if they hold nowhere), `beyond` (the nearest value that was run and where they do not hold; None
        if they hold throughout), `trials` (every run: `holds`, `parameters`, `metrics`), `parameter`, `conditions`.

    Raises:
        ValidationError: an argument is wrong; the message names it.

    """
    wanted = [conditions] if isinstance(conditions, str) else list(conditions)
    goal = (parameter, not largest, float(low), float(high), tolerance)
    found: dict[str, Any] = json.loads(_core.simulate_find(_text(config), goal, wanted, progress))
    return found
