"""transformers and PEFT: the base without PEFT, one adapter set for the whole batch, or `adapter_names` per row."""

from importlib.metadata import version
from typing import Any

import worker


def load(plan: dict[str, Any]) -> worker.Loaded:
    """Load the base; the adapters are put on when the first row wants one, so that base cases do not pay for PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(plan["threads"])
    base = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=getattr(torch, plan["dtype"])).eval()
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    adapted: list[PeftModel] = []

    def load_adapter(index: int) -> None:
        adapted[0].load_adapter(worker.adapter_paths(plan)[index], adapter_name=f"adapter-{index}")

    def with_adapters() -> PeftModel:
        if not adapted:
            adapted.append(PeftModel.from_pretrained(base, plan["adapters"][0], adapter_name="adapter-0").eval())
            for index in range(1, len(plan["adapters"])):
                load_adapter(index)
        return adapted[0]

    def run(prompts: list[list[int]], rows: worker.Adapters, tokens: int, **options: Any) -> Any:
        ids = torch.tensor(prompts)
        wanted = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": tokens,
            "return_dict_in_generate": True,
            **options,
        }
        if all(index is None for index in rows):
            if adapted:
                raise RuntimeError("base cases come first: PEFT's layers cannot be taken off again at no cost")
            model = base
        else:
            # Outside of inference mode, in which nothing can be loaded later.
            model = with_adapters()
            if len(set(rows)) == 1:
                model.set_adapter(f"adapter-{rows[0]}")
            else:
                wanted["adapter_names"] = ["__base__" if index is None else f"adapter-{index}" for index in rows]
        with torch.inference_mode():
            return model.generate(**wanted)

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        return run(prompts, rows, tokens).sequences[:, len(prompts[0]) :].tolist()

    def margins(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[float]]:
        logits = torch.stack(run(prompts, rows, tokens, output_logits=True).logits, dim=1)
        best = logits.topk(2, dim=-1).values
        return ((best[..., 0] - best[..., 1]) / logits.abs().amax(dim=-1)).tolist()

    names = ("torch", "transformers", "peft")
    versions = {name: version(name) for name in names}
    return worker.Loaded(generate, versions, plan["dtype"], load_adapter, margins=margins)


if __name__ == "__main__":
    worker.main(load)
