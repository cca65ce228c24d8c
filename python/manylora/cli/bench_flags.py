"""The flags of `manylora bench serve`; names and defaults of `vllm bench serve` where it has them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag."""
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_results(parser.add_argument_group("results"))


def _add_server(group: Any) -> None:
    group.add_argument("--base-url", metavar="URL", help="the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="its host (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="its port (default: 8000)")
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat", "vllm"),
        default="openai",
        help="completions (openai, vllm) or chats (openai-chat)",
    )
    group.add_argument("--endpoint", metavar="PATH", help="path of the completions (default: by --backend)")
    group.add_argument(
        "--model", metavar="NAME", help="name of the base (default: the first model that the server lists)"
    )
    group.add_argument(
        "--adapters",
        metavar="A,B,...",
        help="adapters to ask for, the most popular first (default: all that the server lists; '' for none)",
    )
    group.add_argument("--lora-modules", nargs="+", metavar="A", help="the same as a list, as vLLM has it")
    group.add_argument("--api-key", metavar="KEY", help="key that the server asks for")
    group.add_argument(
        "--header", action="append", type=_pair, default=[], metavar="KEY=VALUE", help="another header; may be repeated"
    )
    group.add_argument("--insecure", action="store_true", help="take any certificate of a server with TLS")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=_from_zero,
        default=0.0,
        metavar="S",
        help="seconds to wait for the server (default: 0)",
    )
    group.add_argument(
        "--request-timeout",
        type=_above_zero,
        default=600.0,
        metavar="S",
        help="seconds until an answer failed (default: 600)",
    )


def _add_load(group: Any) -> None:
    group.add_argument("--num-prompts", type=_count, default=1000, metavar="N", help="requests (default: 1000)")
    group.add_argument(
        "--num-warmups", type=_whole, default=0, metavar="N", help="requests before them, not counted (default: 0)"
    )
    group.add_argument(
        "--request-rate",
        type=_above_zero,
        default=math.inf,
        metavar="R",
        help="requests per second (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=_above_zero,
        default=1.0,
        metavar="B",
        help="shape of the Gamma distribution of gaps: 1 is a Poisson process, less has bursts (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=_count,
        metavar="N",
        help="most requests at a time; others wait, which is told (default: no limit)",
    )
    group.add_argument(
        "--popularity",
        "--lora-assignment",
        default="uniform",
        metavar="MIX",
        help="uniform, distinct, identical, skewed, zipf:ALPHA or power:ALPHA, or vLLM's random and round-robin "
        "(default: uniform)",
    )
    group.add_argument(
        "--base-share", type=_share, default=0.0, metavar="S", help="share of requests to the base (default: 0)"
    )
    group.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")


def _add_prompts(group: Any) -> None:
    group.add_argument(
        "--input-len", "--random-input-len", default="1024", metavar="N|A:B", help="tokens of a prompt (default: 1024)"
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        default="128",
        metavar="N|A:B",
        help="most tokens of an answer (default: 128)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_from_zero,
        default=0.0,
        metavar="R",
        help="lengths of N (1 - R) to N (1 + R) (default: 0)",
    )
    group.add_argument(
        "--dataset-name", choices=("random", "custom"), help="where prompts are from (default: by --dataset-path)"
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="lines of JSON with `prompt` or `messages`, and maybe `output_tokens` and `model`",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="take a dataset's lines in their order")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers have their full length (default: of random prompts they do)",
    )
    group.add_argument("--temperature", type=_from_zero, default=0.0, metavar="T", help="of every request (default: 0)")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of every request")


def _add_results(group: Any) -> None:
    group.add_argument("--output", "--result-filename", metavar="FILE", help="write the result as JSON")
    group.add_argument("--save-detailed", action="store_true", help="put every request's own figures and text into it")
    group.add_argument("--report", metavar="FILE", help="write a report as .html, or as .png with matplotlib")
    group.add_argument(
        "--metric-percentiles", type=_percents, default=(50.0, 90.0, 99.0), metavar="P,P", help="(default: 50,90,99)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_goal,
        metavar="METRIC:MS",
        help="count requests within these limits, such as ttft:200 tpot:50 e2el:5000",
    )
    group.add_argument("--label", help="name of the run in the result")
    group.add_argument(
        "--metadata", nargs="+", type=_pair, default=[], metavar="KEY=VALUE", help="more fields of the result"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _number(text: str, is_good: Callable[[float], bool], told: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_good(number):
        raise argparse.ArgumentTypeError(told)
    return number


def _above_zero(text: str) -> float:
    return _number(text, lambda number: number > 0, "must be a number above 0")


def _whole(text: str) -> int:
    return int(_number(text, lambda number: number >= 0 and number % 1 == 0, "must be a whole number from 0"))


def _from_zero(text: str) -> float:
    return _number(text, lambda number: 0 <= number < math.inf, "must be a number from 0")


def _share(text: str) -> float:
    return _number(text, lambda number: 0 <= number <= 1, "must be a number from 0 to 1")


def _count(text: str) -> int:
    return int(_number(text, lambda number: number >= 1 and number % 1 == 0, "must be a whole number from 1"))


def _percents(text: str) -> tuple[float, ...]:
    percents = {
        _number(part, lambda number: 0 <= number <= 100, "must be numbers from 0 to 100") for part in text.split(",")
    }
    # The table and the report speak of the last.
    return tuple(sorted(percents | {99.0}))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"`{text}` must be KEY=VALUE")
    return key, value


def _goal(text: str) -> tuple[str, float]:
    metric, _, limit = text.partition(":")
    if metric not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"`{text}` must be ttft, tpot or e2el, a colon and milliseconds")
    return metric, _above_zero(limit)
