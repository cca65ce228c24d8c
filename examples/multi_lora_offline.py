"""Three prompts in one call: two adapters and the base, in one batch.

Adapters are named by path or by hub id (`--sql`, `--support`); a hub id is fetched with `snapshot_download`. With no
arguments this runs on the demo's model (`manylora demo` fetches it) and the adapters that come with the package.
"""

import argparse
from pathlib import Path

from huggingface_hub import snapshot_download

import manylora
from manylora import LLM, SamplingParams
from manylora.cli import smollm2
from manylora.lora.request import LoRARequest

SHIPPED = Path(manylora.__file__).parent / "demo" / "adapters"


def local(adapter: str) -> str:
    return adapter if Path(adapter).expanduser().exists() else snapshot_download(adapter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sql", default=str(SHIPPED / "sql"), help="adapter of the first prompt, path or hub id")
    parser.add_argument("--support", default=str(SHIPPED / "support"), help="adapter of the third, path or hub id")
    parser.add_argument("--max-tokens", type=int, default=48)
    arguments = parser.parse_args()

    llm = LLM(
        model=arguments.model or smollm2.find(None),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=64,
        max_model_len=2048,
    )
    sql = LoRARequest("sql", 1, local(arguments.sql))
    support = LoRARequest("support", 2, local(arguments.support))

    questions = [
        "List the email of all customers where city is Vienna.",
        "What is the capital of France?",
        "My parcel is late and nobody answers the phone!",
    ]
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(temperature=0, max_tokens=arguments.max_tokens),
        lora_request=[sql, None, support],
    )
    for question, output in zip(questions, outputs, strict=True):
        name = output.lora_request.lora_name if output.lora_request else "base"
        print(f"[{name}] {question}")
        print(output.outputs[0].text)


if __name__ == "__main__":
    main()
