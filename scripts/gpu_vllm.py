#!/usr/bin/env python3
"""vLLM on what `card` measured, on the same card: the same weights, prompts, streams and share of memory.

gpu_vllm.py --folder WORK --ours card.json --json vllm.json

`card.json` is what `bin/card --folder WORK --json card.json` wrote: it says what was measured. Needs a Python
environment with vLLM. Everything that is not named here is as vLLM has it by default. A step's time is that of the
engine's bench: the difference between a long and a short run, over the tokens between them, so that prefill and
start-up cancel out.
"""

import argparse
import json
import statistics
import sys
import time


def prompt(row: int, turn: int, tokens: int) -> list[int]:
    """Return a prompt of the engine's bench: different in each row and each turn."""
    return [(at * 131 + row * 7919 + turn * 104_729) % 40_000 + 1 for at in range(tokens)]


def main() -> None:
    """Measure vLLM where ManyLoRA was measured, and print one against the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folder", "ours", "json"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    with open(arguments.ours, encoding="utf-8") as file:
        ours = json.load(file)
    decode = [case for case in ours["cases"] if case["case"] == "decode"]
    if not decode:
        sys.exit(f"{arguments.ours} has no decode steps to compare with")
    shape, rank, tokens, rounds = ours["shape"], ours["rank"], ours["tokens"], ours["rounds"]
    most, adapters = max(case["streams"] for case in decode), max(case["adapters"] for case in decode)

    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=f"{arguments.folder}/{shape}",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=ours["gpu_memory_utilization"],
        max_num_seqs=max(most, 8),
        # Long and short runs have the same prompts: what one computed must not be found by the other.
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=max(adapters, 1),
        max_lora_rank=rank,
    )
    loras = [
        LoRARequest(f"adapter-{index}", index + 1, f"{arguments.folder}/{shape}-adapter-{index}-r{rank}")
        for index in range(adapters)
    ]

    def seconds(rows: int, count: int, turn: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": prompt(row, turn, ours["prompt"])} for row in range(rows)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        lora = [loras[row % count] for row in range(rows)] if count else None
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
        taken = time.perf_counter() - start
        made = {len(output.outputs[0].token_ids) for output in outputs}
        if len(outputs) != rows or made != {tokens}:
            sys.exit(f"vLLM made {made} tokens for {len(outputs)} prompts; {tokens} for {rows} were asked for")
        return taken

    def step(rows: int, count: int, turn: int) -> float:
        short = seconds(rows, count, turn, 1)
        return (seconds(rows, count, turn, tokens) - short) / (tokens - 1)

    cases = []
    for rows in sorted({case["streams"] for case in decode}):
        wanted = [case for case in decode if case["streams"] == rows]
        for case in wanted:
            seconds(rows, case["adapters"], 0, tokens)
        # In turns, as ours.
        taken: list[list[float]] = [[] for _ in wanted]
        for turn in range(rounds):
            for case, steps in zip(wanted, taken, strict=True):
                steps.append(step(rows, case["adapters"], turn))
        for case, steps in zip(wanted, taken, strict=True):
            median = statistics.median(steps)
            speed = rows / median
            ratio = case["tokens_per_second"] / speed
            print(
                f"vLLM {vllm.__version__}, {rows:>3} streams, {case['adapters']:>2} adapters: {speed:>9.1f} tok/s, "
                f"step {median * 1e3:>8.3f} ms; ManyLoRA {case['tokens_per_second']:>9.1f} tok/s, x{ratio:.3f} of it",
                flush=True,
            )
            cases.append(
                {
                    "streams": rows,
                    "adapters": case["adapters"],
                    "step_seconds": median,
                    "tokens_per_second": speed,
                    "manylora_tokens_per_second": case["tokens_per_second"],
                    "manylora_over_vllm": ratio,
                }
            )
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump({"vllm": vllm.__version__, "card": ours["card"], "cases": cases}, file, indent=2)
        file.write("\n")


# vLLM starts processes of its own, which import this file.
if __name__ == "__main__":
    main()
