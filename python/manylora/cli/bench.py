"""`manylora bench serve`: open-loop load on an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import random
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from manylora import picture_path
from manylora.bench import load, report
from manylora.bench.arrivals import due_times
from manylora.bench.client import Client
from manylora.bench.figures import figures
from manylora.bench.measure import Measurement
from manylora.bench.popularity import Popularity, choose
from manylora.bench.prompts import Lengths, Prompt, dataset_prompts, random_prompts
from manylora.bench.summary import detailed, summarize
from manylora.bench.table import table
from manylora.bench.target import Target
from manylora.cli import bench_flags
from manylora.exceptions import RequestError, ValidationError

EXAMPLES = """\
examples:
  manylora bench serve --num-prompts 200 --request-rate 4 --input-len 64:256 --output-len 64
  manylora bench serve --base-url http://host:8000 --adapters sql,support --popularity zipf:1.1 --base-share 0.2 \\
      --request-rate 8 --burstiness 0.5 --output result.json --report report.html

environment:
  OPENAI_API_KEY   the key, where --api-key gives none
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    bench = commands.add_parser(
        "bench",
        help="measure a running server",
        description="Measure a running server.",
        epilog="examples:\n  manylora bench serve --num-prompts 200 --request-rate 4\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = kinds.add_parser(
        "serve",
        help="send requests at their own pace, and time every token",
        description=(
            "Send requests to an OpenAI-compatible server when a random process says so, each with an adapter drawn "
            "by popularity, and time every token that comes back. A slow server does not slow the load down."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_flags.add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure; the status is 1 if no request was completed."""
    if arguments.report:
        report.check_path(arguments.report)
    if arguments.output:
        picture_path.check_place("--output", arguments.output)
    settings = _settings(arguments)
    _lengths(arguments)
    measured, start, end, models = asyncio.run(_measure(arguments))
    percents = arguments.metric_percentiles
    result = (
        settings
        | models
        | summarize(measured, start, end, percents, dict(arguments.goodput) if arguments.goodput else None)
    )
    shown = table(result, percents)
    print(shown)
    if arguments.output:
        content = result | (detailed(measured, start) if arguments.save_detailed else {})
        try:
            Path(arguments.output).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValidationError(f"the result `{arguments.output}` cannot be written: {error}") from error
    if arguments.report:
        title = arguments.label or f"{result['model_id']}: {result['num_prompts']} requests, {result['popularity']}"
        report.write(arguments.report, title, shown, figures(result, measured, start, end))
    return 0 if result["completed"] else 1


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    rate = arguments.request_rate
    return dict(arguments.metadata) | {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": arguments.backend,
        "endpoint_type": arguments.backend,
        "label": arguments.label,
        "num_prompts": arguments.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "popularity": str(Popularity.read(arguments.popularity)),
        "base_share": arguments.base_share,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "seed": arguments.seed,
    }


def _target(arguments: argparse.Namespace) -> Target:
    headers = dict(arguments.header)
    if key := arguments.api_key or os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    is_chat = arguments.backend == "openai-chat"
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = arguments.base_url or f"http://{host}:{arguments.port}"
    ignores = arguments.ignore_eos if arguments.ignore_eos is not None else not arguments.dataset_path
    sampling = {
        "temperature": arguments.temperature,
        **({"ignore_eos": True} if ignores else {}),
        **arguments.extra_body,
    }
    endpoint = arguments.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
    return Target(
        Client(url.removesuffix("/").removesuffix("/v1"), headers, not arguments.insecure),
        endpoint,
        sampling,
        arguments.request_timeout,
    )


def _lengths(arguments: argparse.Namespace) -> list[Lengths]:
    texts = (arguments.input_len, arguments.output_len)
    return [Lengths.read(text).around(arguments.random_range_ratio) for text in texts]


def _prompts(arguments: argparse.Namespace, tokens: list[int] | None, source: random.Random) -> list[Prompt]:
    count = arguments.num_prompts + arguments.num_warmups
    inputs, outputs = _lengths(arguments)
    if arguments.dataset_path and arguments.dataset_name != "random":
        return dataset_prompts(Path(arguments.dataset_path), count, outputs, source, not arguments.disable_shuffle)
    if arguments.dataset_name == "custom":
        raise ValidationError("--dataset-name custom needs --dataset-path")
    return random_prompts(count, inputs, outputs, tokens, source)


async def _measure(arguments: argparse.Namespace) -> tuple[list[Measurement], float, float, dict[str, Any]]:
    target = _target(arguments)
    base, adapters = arguments.model, arguments.lora_modules
    if arguments.adapters is not None:
        adapters = [name for name in arguments.adapters.split(",") if name]
    listed_base, listed = await target.models(arguments.ready_check_timeout_sec)
    base, adapters = base or listed_base, listed if adapters is None else adapters
    # Each of what is drawn has numbers of its own: another rate leaves the prompts as they were.
    prompts = _prompts(arguments, await target.tokens(base), random.Random(f"prompts {arguments.seed}"))
    mix = Popularity.read(arguments.popularity)
    chosen = choose(mix, adapters, len(prompts), arguments.base_share, random.Random(f"adapters {arguments.seed}"))
    models = [prompt.model or name or base for prompt, name in zip(prompts, chosen, strict=True)]
    bodies = [target.body(prompt, model) for prompt, model in zip(prompts, models, strict=True)]
    dues = due_times(
        arguments.num_prompts, arguments.request_rate, arguments.burstiness, random.Random(f"arrivals {arguments.seed}")
    )
    measured = [
        Measurement(model, model == base, due, input_len=prompt.input_len)
        for model, prompt, due in zip(models, prompts, dues, strict=False)
    ]
    await _warm_up(target, bodies[arguments.num_prompts :], arguments.max_concurrency)
    with tqdm(total=len(measured), unit="request", disable=arguments.disable_tqdm) as bar:
        start, end = await load.run(
            measured,
            lambda number, one: target.send(bodies[number], one),
            arguments.max_concurrency,
            lambda _: bar.update(),
        )
    target.client.close()
    target.read_answers()
    return measured, start, end, {"model_id": base, "tokenizer_id": base, "base_url": target.client.url}


async def _warm_up(target: Target, bodies: list[bytes], max_concurrency: int | None) -> None:
    warming = [Measurement("", False, 0.0) for _ in bodies]
    await load.run(warming, lambda number, one: target.send(bodies[number], one), max_concurrency)
    target.read_answers()
    if bodies and all(one.error is not None for one in warming):
        raise RequestError(f"no request of the warm-up was completed; the first said: {warming[0].error}")
