"""One stream end to end through Python: `LLM.generate`, greedy, as a fraction of the machine's roofline.

A step of one row cannot be faster than the bytes of the weights and of its KV at the bandwidth that the engine's
threads reach; that is measured in this process before and after each round. The rest is told by where it goes: the
backend, the engine's own thread, and what lies outside of it (Python, and waking its thread).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from manylora import LLM, SamplingParams, _core

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 2048, "kv_cache_memory_bytes": 512 << 20}
# Seconds for a measurement of the bandwidth.
PROBE = 0.1


def seconds_of(llm: LLM) -> dict[str, float]:
    seconds: dict[str, float] = llm.llm_engine.stats()["phase_seconds"]
    return seconds


def one_round(llm: LLM, number: int, prompt: int, tokens: int, threads: int | None) -> dict[str, float]:
    """Return the seconds of one call: its floor, and what it took, by where."""
    # Prompts differ from round to round: no prefix is found in a cache.
    token_ids = [(at * 131 + number * 7919) % 40_000 + 1000 for at in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    info = llm.llm_engine.core.info()
    kv_bytes = info.block_bytes / info.block_size
    before = _core.read_bandwidth(threads, PROBE)
    phases = seconds_of(llm)
    began = time.perf_counter()
    (output,) = llm.generate([token_ids], params, use_tqdm=False)
    total = time.perf_counter() - began
    phases = {name: seconds - phases[name] for name, seconds in seconds_of(llm).items()}
    bandwidth = (before + _core.read_bandwidth(threads, PROBE)) / 2
    generated = len(output.outputs[0].token_ids)
    assert generated == tokens, f"{generated} tokens came, {tokens} were asked for"
    # The first step computes the prompt and gives the first token; each reads all weights, and the KV that is there.
    read = sum(info.weight_bytes + kv_bytes * (prompt + step) for step in range(tokens))
    forward = phases.pop("forward")
    own = sum(phases.values())
    return {
        "bandwidth": bandwidth,
        "floor": read / bandwidth,
        "total": total,
        "forward": forward,
        "own": own,
        "outside": total - forward - own,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=os.environ.get("MANYLORA_SMOLLM2"), help="SmolLM2-135M (or MANYLORA_SMOLLM2)"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--threads", type=int, help="threads that compute (default: the engine's)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    if not arguments.model:
        parser.error("give --model, or set MANYLORA_SMOLLM2")
    if min(arguments.rounds, arguments.prompt, arguments.tokens) < 1:
        parser.error("--rounds, --prompt and --tokens must be at least 1")
    threads = {} if arguments.threads is None else {"num_threads": arguments.threads}
    with LLM(arguments.model, use_tqdm_on_load=False, **SETTINGS, **threads) as llm:
        shape = arguments.prompt, arguments.tokens, arguments.threads
        # The first round warms up.
        rounds = [one_round(llm, number, *shape) for number in range(arguments.rounds + 1)][1:]
        machine = llm.llm_engine.core.info().backend
    fractions = [one["floor"] / one["total"] for one in rounds]
    best_bandwidth = max(one["bandwidth"] for one in rounds)
    floor_at_best = statistics.median(one["floor"] * one["bandwidth"] for one in rounds) / best_bandwidth
    result = {
        "machine": machine,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "fraction_of_roofline": statistics.median(fractions),
        "undisturbed": floor_at_best / min(one["total"] for one in rounds),
        "tokens_per_second": arguments.tokens / statistics.median(one["total"] for one in rounds),
        # Of the time of a call.
        "share": {
            part: statistics.median(one[part] / one["total"] for one in rounds)
            for part in ("floor", "forward", "own", "outside")
        },
        "rounds": rounds,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
