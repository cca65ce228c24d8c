"""OpenVINO GenAI: its pipeline with continuous batching, without adapters for the base, then one with adapters.

Adapters belong to a step of its scheduler: rows of one batch that name different ones all get the first row's.
"""

import gc
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import worker


def load(plan: dict[str, Any]) -> worker.Loaded:
    """Compile the model without adapters."""
    paths = worker.adapter_paths(plan)
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": plan["threads"]}
    if plan["action"] == "agreement":
        # Its own choices are 8-bit keys and values, and bf16 products where there are instructions for them.
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    adapters: dict[int, tuple[openvino_genai.Adapter, float]] = {}

    def load_adapter(index: int) -> None:
        config = json.loads((Path(paths[index]) / "adapter_config.json").read_text(encoding="utf-8"))
        adapter = openvino_genai.Adapter(Path(paths[index]) / "adapter_model.safetensors")
        # It reads the tensors only: the scale has to be told.
        adapters[index] = (adapter, config["lora_alpha"] / config["r"])

    def make(**more: Any) -> openvino_genai.ContinuousBatchingPipeline:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        return openvino_genai.ContinuousBatchingPipeline(plan["model"], scheduler, "CPU", properties | more)

    pipeline = [make()]

    def pipeline_for(rows: worker.Adapters) -> openvino_genai.ContinuousBatchingPipeline:
        if adapters and set(rows) == {None}:
            raise RuntimeError("base cases come first: the pipeline without adapters is gone then")
        if not adapters and set(rows) != {None}:
            pipeline.clear()
            gc.collect()
            for index in range(len(plan["adapters"])):
                load_adapter(index)
            pipeline.append(make(adapters=openvino_genai.AdapterConfig(list(adapters.values()))))
        return pipeline[0]

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        if len(set(rows)) > 1:
            raise ValueError("OpenVINO would use the first row's adapter for all rows")
        chosen = pipeline_for(rows)
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        if rows[0] is not None:
            adapter, scale = adapters[rows[0]]
            config.adapters = openvino_genai.AdapterConfig(adapter, scale)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = chosen.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    names = ("openvino", "openvino-genai")
    precision = "f32" if plan["dtype"] == "float32" else "bf16"
    versions = {name: version(name) for name in names}
    return worker.Loaded(generate, versions, f"f16 weights, {precision}", load_adapter)


if __name__ == "__main__":
    worker.main(load)
