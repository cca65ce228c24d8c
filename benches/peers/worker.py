"""What every peer's process does: load, warm up, time each case, say what it cost.

A peer is a function that loads the model and returns `Loaded`; its process is started with a plan file, writes its
report and ends, so that nothing of one peer is in memory while another is measured.
"""

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In place of a token that an engine which only gives text does not show.
UNREADABLE = -1
# A case is measured again until it has taken so long, but not more often than this.
CASE_SECONDS = 20
MOST_PAIRS = 5
# Adapter of each row by index; None is the base.
Adapters = list[int | None]


@dataclass(frozen=True)
class Loaded:
    """A peer that is ready."""

    # Prompts as token ids, the adapter of each row, new tokens per row: returns each row's new tokens.
    generate: Callable[[list[list[int]], Adapters, int], list[list[int]]]
    versions: dict[str, str]
    dtype: str
    # Of the reference only: by how much of the largest logit the best leads the second, for each row and new token.
    margins: Callable[[list[list[int]], Adapters, int], list[list[float]]] | None = None


def prompts(rows: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Token ids above the bytes and below the end token; the same for every peer."""
    source = random.Random(seed)
    return [[source.randrange(256, vocab - 1) for _ in range(length)] for _ in range(rows)]


def spelled(tokens: list[int]) -> str:
    """The text that the benchmark's tokenizer turns into these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def measure(plan: dict[str, Any], peer: Loaded) -> dict[str, Any]:
    """Time every case of the plan."""

    def seconds(case: dict[str, Any], tokens: int, call: int) -> float:
        # New prompts in every call: no engine may find a prefix in its cache.
        seed = (plan["round"] * 100 + case["seed"]) * 100 + call
        batch = prompts(len(case["adapters"]), case["prompt"], plan["vocab"], seed)
        start = time.perf_counter()
        rows = peer.generate(batch, case["adapters"], tokens)
        elapsed = time.perf_counter() - start
        if [len(row) for row in rows] != [tokens] * len(batch):
            raise RuntimeError(f"{case['name']}: {[len(row) for row in rows]} new tokens instead of {tokens} each")
        return elapsed

    results = {}
    for case in plan["cases"]:
        rows, tokens = len(case["adapters"]), plan["tokens"]
        peer.generate(prompts(rows, 8, plan["vocab"], case["seed"]), case["adapters"], 2)
        pairs: list[list[float]] = []
        begin = time.perf_counter()
        # A fast engine's difference is small: it gets the time of a slow one's single pair for several.
        while len(pairs) < MOST_PAIRS and (not pairs or time.perf_counter() - begin < CASE_SECONDS):
            call = 2 * len(pairs)
            pairs.append(
                [seconds(case, 1, call), seconds(case, tokens, call + 1)]
                if case["decode"]
                else [seconds(case, 1, call)]
            )
        if case["decode"]:
            # Something else took the machine if more tokens took no more time.
            rates = [rows * (tokens - 1) / (long - short) for short, long in pairs if long > short]
        else:
            rates = [rows * case["prompt"] / short for (short,) in pairs]
        rate = statistics.median(rates) if rates else None
        results[case["name"]] = {"tokens_per_second": rate, "seconds": pairs}
    return results


def agreement(plan: dict[str, Any], peer: Loaded) -> dict[str, Any]:
    """The greedy tokens of every decode case, to compare peers with each other."""
    results = {}
    for case in plan["cases"]:
        if case["decode"]:
            batch = prompts(len(case["adapters"]), case["prompt"], plan["vocab"], case["seed"])
            results[case["name"]] = {"tokens": peer.generate(batch, case["adapters"], plan["tokens"])}
            if peer.margins is not None:
                results[case["name"]]["margins"] = peer.margins(batch, case["adapters"], plan["tokens"])
    return results


def main(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Run a plan with a peer."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    start = time.perf_counter()
    peer = load(plan)
    loaded = time.perf_counter() - start
    results = {"measure": measure, "agreement": agreement}[plan["action"]](plan, peer)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "results": results,
        "load_seconds": loaded,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "versions": peer.versions | {"python": sys.version.split()[0]},
        "dtype": peer.dtype,
    }
    Path(plan["report"]).write_text(json.dumps(report), encoding="utf-8")
    # Engines with threads of their own need not be waited for.
    sys.stdout.flush()
    os._exit(0)
