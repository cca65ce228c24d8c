"""What every engine's process does: load, warm up, time each case, say what it cost.

A peer is a function that loads the model and returns `Loaded`; its process is started with a plan file, writes its
report and ends, so that nothing of one engine is in memory while another is measured.
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
# A case is measured again until it has taken the plan's seconds, but not more often than this.
MOST_REPEATS = 5
# Adapter of each row by index into the plan's `adapters` and then `cold_adapters`; None is the base.
Adapters = list[int | None]


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready, with the plan's `adapters` loaded as far as it can have them loaded."""

    # Prompts as token ids, the adapter of each row, new tokens per row: returns each row's new tokens.
    generate: Callable[[list[list[int]], Adapters, int], list[list[int]]]
    versions: dict[str, str]
    dtype: str
    # The engine's own call that loads an adapter; None where it has no adapters.
    load_adapter: Callable[[int], object] | None = None
    # Whether a request may name an adapter that was not loaded.
    loads_on_request: bool = False
    # Of the reference only: by how much of the largest logit the best leads the second, for each row and new token.
    margins: Callable[[list[list[int]], Adapters, int], list[list[float]]] | None = None


def adapter_paths(plan: dict[str, Any]) -> list[str]:
    """Folders of all adapters, by index."""
    return [*plan["adapters"], *plan["cold_adapters"]]


def prompts(rows: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Token ids above the bytes and below the end token; the same for every engine."""
    source = random.Random(seed)
    return [[source.randrange(256, vocab - 1) for _ in range(length)] for _ in range(rows)]


def spelled(tokens: list[int]) -> str:
    """The text that the benchmark's tokenizer turns into these tokens."""
    return " ".join(f"w{token}" for token in tokens)


class Measurement:
    """Times the cases of a plan."""

    def __init__(self, plan: dict[str, Any], peer: Loaded):
        self.plan = plan
        self.peer = peer

    def seconds(self, case: dict[str, Any], tokens: int, call: int, adapters: Adapters | None = None) -> float:
        """Time one call."""
        adapters = case["adapters"] if adapters is None else adapters
        # New prompts in every call: no engine may find a prefix in its cache.
        seed = (self.plan["round"] * 100 + case["seed"]) * 100 + call
        batch = prompts(len(adapters), case["prompt"], self.plan["vocab"], seed)
        start = time.perf_counter()
        rows = self.peer.generate(batch, adapters, tokens)
        elapsed = time.perf_counter() - start
        if [len(row) for row in rows] != [tokens] * len(batch):
            raise RuntimeError(f"{case['name']}: {[len(row) for row in rows]} new tokens instead of {tokens} each")
        return elapsed

    def repeats(self, one: Callable[[int], list[float]]) -> list[list[float]]:
        """Repeat: a fast engine's difference is small, it gets the time of a slow one's single turn for several."""
        found: list[list[float]] = []
        begin = time.perf_counter()
        while len(found) < MOST_REPEATS and (not found or time.perf_counter() - begin < self.plan["seconds_per_case"]):
            found.append(one(len(found)))
        return found

    def decode(self, case: dict[str, Any]) -> dict[str, Any]:
        """Tokens/s of all rows together; prefill and start-up cancel out."""
        tokens, rows = case["tokens"], len(case["adapters"])
        pairs = self.repeats(lambda turn: [self.seconds(case, 1, 2 * turn), self.seconds(case, tokens, 2 * turn + 1)])
        # Something else took the machine if more tokens took no more time.
        rates = [rows * (tokens - 1) / (long - short) for short, long in pairs if long > short]
        return {"value": statistics.median(rates) if rates else None, "seconds": pairs}

    def prefill(self, case: dict[str, Any]) -> dict[str, Any]:
        """Prompt tokens/s until the first new token is there."""
        times = self.repeats(lambda turn: [self.seconds(case, 1, turn)])
        rate = len(case["adapters"]) * case["prompt"] / statistics.median(time for (time,) in times)
        return {"value": rate, "seconds": times}

    def cold(self, case: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds that a first token takes longer if its adapter was never loaded, and those of the load call."""
        load = self.peer.load_adapter
        if load is None:
            raise RuntimeError(f"{case['name']}: this engine has no adapters")
        first, cold = len(self.plan["adapters"]), len(self.plan["cold_adapters"])

        def timed_load(adapter: int) -> float:
            start = time.perf_counter()
            load(adapter)
            return time.perf_counter() - start

        def one(turn: int) -> list[float]:
            fresh, other = first + 2 * turn, first + 2 * turn + 1
            resident = self.seconds(case, 1, 2 * turn)
            # The call is timed with another adapter if the request itself can load this one.
            call = timed_load(other if self.peer.loads_on_request else fresh)
            request = self.seconds(case, 1, 2 * turn + 1, [fresh])
            return [resident, request if self.peer.loads_on_request else call + request, call]

        times = [one(turn) for turn in range(cold // 2)]
        return {
            "value": 1000 * statistics.median(cold - resident for resident, cold, _ in times),
            "load_call_ms": 1000 * statistics.median(call for *_, call in times),
            "seconds": times,
        }

    def run(self) -> dict[str, Any]:
        """Time every case."""
        results = {}
        for case in self.plan["cases"]:
            # The same lengths: engines make some of their code for them.
            warm = prompts(len(case["adapters"]), case["prompt"], self.plan["vocab"], case["seed"])
            self.peer.generate(warm, case["adapters"], min(2, case["tokens"]))
            begin = time.perf_counter()
            results[case["name"]] = getattr(self, case["kind"])(case) | {"took": time.perf_counter() - begin}
        return results


def measure(plan: dict[str, Any], peer: Loaded) -> dict[str, Any]:
    """Time every case of the plan."""
    return Measurement(plan, peer).run()


def agreement(plan: dict[str, Any], peer: Loaded) -> dict[str, Any]:
    """The greedy tokens of every case, to compare engines with each other."""
    results: dict[str, Any] = {}
    resident = set(range(len(plan["adapters"])))
    for case in plan["cases"]:
        if not peer.loads_on_request and peer.load_adapter is not None:
            for index in set(case["adapters"]) - resident - {None}:
                peer.load_adapter(index)
        batch = prompts(len(case["adapters"]), case["prompt"], plan["vocab"], case["seed"])
        results[case["name"]] = {"tokens": peer.generate(batch, case["adapters"], case["tokens"])}
        if peer.margins is not None:
            results[case["name"]]["margins"] = peer.margins(batch, case["adapters"], case["tokens"])
    return results


def main(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Run a plan with an engine."""
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
