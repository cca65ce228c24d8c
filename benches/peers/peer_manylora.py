"""ManyLoRA: one batch, every row with its own adapter."""

from importlib.metadata import version
from typing import Any

import worker


def load(plan: dict[str, Any]) -> worker.Loaded:
    """Load the base and put the adapters on the shelf."""
    from manylora import LLM, SamplingParams
    from manylora.lora.request import LoRARequest

    paths = worker.adapter_paths(plan)
    llm = LLM(
        model=plan["model"],
        dtype=plan["dtype"],
        enable_lora=True,
        max_lora_rank=plan["rank"],
        max_loras=len(paths),
        max_cpu_loras=len(paths),
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
        num_threads=plan["threads"],
        use_tqdm_on_load=False,
    )
    adapters = [LoRARequest(f"adapter-{index}", index + 1, path) for index, path in enumerate(paths)]

    def load_adapter(index: int) -> None:
        llm.llm_engine.add_lora(adapters[index])

    for index in range(len(plan["adapters"])):
        load_adapter(index)

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
            lora_request=[None if index is None else adapters[index] for index in rows],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    versions = {"manylora": version("manylora")}
    return worker.Loaded(generate, versions, plan["dtype"], load_adapter, loads_on_request=True)


if __name__ == "__main__":
    worker.main(load)
