"""mistral.rs: concurrent requests to one `Runner`, each with its own adapter.

A `Runner` takes one call at a time, so threads cannot share it. A streamed request returns at once and runs in the
engine: all rows are started, then their streams are drained.
"""

import re
from importlib.metadata import version
from typing import Any

import worker


def load(plan: dict[str, Any]) -> worker.Loaded:
    """Load the base with its dynamic adapters."""
    from mistralrs import ChatCompletionRequest, LoraAdapter, Runner, Which

    adapters = [LoraAdapter(f"adapter-{index}", path) for index, path in enumerate(plan["adapters"])]
    which = Which.Lora(model_id=plan["model"], adapters=adapters, max_adapters=len(worker.adapter_paths(plan)))
    runner = Runner(which=which, max_seqs=32, prefix_cache_n=0)

    def load_adapter(index: int) -> None:
        runner.load_lora_adapter(f"adapter-{index}", worker.adapter_paths(plan)[index])

    def generate(prompts: list[list[int]], rows: worker.Adapters, tokens: int) -> list[list[int]]:
        streams = []
        for prompt, index in zip(prompts, rows, strict=True):
            request = ChatCompletionRequest(
                messages=[{"role": "user", "content": worker.spelled(prompt)}],
                model="default",
                max_tokens=tokens,
                temperature=0.0,
                ignore_eos=True,
                stream=True,
                adapter=None if index is None else f"adapter-{index}",
            )
            streams.append(runner.send_chat_completion_request(request))
        return [row(stream, len(prompt), tokens) for stream, prompt in zip(streams, prompts, strict=True)]

    def row(stream: Any, prompt: int, tokens: int) -> list[int]:
        text, usage = "", None
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        if usage is None or (usage.prompt_tokens, usage.completion_tokens) != (prompt, tokens):
            raise RuntimeError(f"{prompt} and {tokens} tokens were asked for, got {usage}")
        # A word of the benchmark's tokenizer names its token, an ASCII character is a byte.
        found = [int(word[1:]) if len(word) > 1 else ord(word) for word in re.findall(r"w\d+|[\0-\x7f]", text)]
        # Other bytes cannot be told from the text; how many tokens there are is what the engine says.
        return found if len(found) == tokens else [worker.UNREADABLE] * tokens

    return worker.Loaded(generate, {"mistralrs": version("mistralrs")}, "its own choice", load_adapter)


if __name__ == "__main__":
    worker.main(load)
