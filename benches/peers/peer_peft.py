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

    def with_adapters() -> PeftModel:
        if not adapted:
            first, *others = plan["adapters"]
            model = PeftModel.from_pretrained(base, first, adapter_name="adapter-0")
            for index, path in enumerate(others, start=1):
                model.load_adapter(path, adapter_name=f"adapter-{index}")
            adapted.append(model.eval())
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
        with torch.inference_mode():
            if all(index is None for index in rows):
                if adapted:
                    raise RuntimeError("base cases come first: PEFT's layers cannot be taken off again at no cost")
                return base.generate(**wanted)
            if len(set(rows)) == 1:
                model = with_adapters()
                model.set_adapter(f"adapter-{rows[0]}")
                return model.generate(**wanted)
            names = ["__base__" if index is None else f"adapter-{index}" for index in rows]
            return with_adapters().generate(**wanted, adapter_names=names)

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        return run(prompts, rows, tokens).sequences[:, len(prompts[0]) :].tolist()

    def margins(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[float]]:
        logits = torch.stack(run(prompts, rows, tokens, output_logits=True).logits, dim=1)
        best = logits.topk(2, dim=-1).values
        return ((best[..., 0] - best[..., 1]) / logits.abs().amax(dim=-1)).tolist()

    names = ("torch", "transformers", "peft")
    return worker.Loaded(generate, {name: version(name) for name in names}, plan["dtype"], margins)


if __name__ == "__main__":
    worker.main(load)
