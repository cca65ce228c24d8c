"""A shelf of adapters over time: registered from a list, read when asked for, replaced and unloaded while serving.

With no arguments this runs on the demo's model (`manylora demo` fetches it) and the adapters that come with the
package; `--manifest` takes a JSON list of objects with `name`, `path` and `id`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import manylora
from manylora import LLM, SamplingParams
from manylora.cli import smollm2
from manylora.engine import read_manifest
from manylora.lora.request import LoRARequest

SHIPPED = Path(manylora.__file__).parent / "demo" / "adapters"
QUESTION = "List the email of all customers where city is Vienna."


def shipped_manifest(folder: str) -> Path:
    entries = [
        {"name": path.name, "path": str(path), "id": number}
        for number, path in enumerate(sorted(SHIPPED.iterdir()), start=1)
        if path.is_dir()
    ]
    manifest = Path(folder) / "adapters.json"
    manifest.write_text(json.dumps(entries))
    return manifest


def shelf(llm: LLM) -> str:
    stats = llm.llm_engine.stats()
    resident, read, blocks = len(stats["adapters"]), stats["adapter_reads"], stats["total_blocks"]
    return f"{resident} resident in {stats['adapter_bytes']} bytes, {read} read so far, {blocks} KV blocks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--manifest", help="JSON list of adapters (default: those that come with the package)")
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()

    llm = LLM(arguments.model or smollm2.find(None), enable_lora=True, max_lora_rank=64, max_model_len=512)
    engine = llm.llm_engine
    with tempfile.TemporaryDirectory() as folder:
        manifest = arguments.manifest or shipped_manifest(folder)
        # Names and sizes are known from now on; of the tensors nothing is read.
        for name, error in engine.register_loras(manifest).items():
            print(f"refused: {name}: {error}")
        found = read_manifest(manifest)
    known = engine.list_loras()
    adapters = [LoRARequest(name, number, path) for name, number, path in found if number in known]
    print(f"registered {len(known)}: {shelf(llm)}")

    # Each is read by the first request that names it; who pays for two shares gets two thirds of a full engine.
    engine.set_weight(2, tenant="gold")
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    prompts = [{"prompt": QUESTION, "tenant": "gold" if i == 0 else "others"} for i in range(len(adapters))]
    for output in llm.generate(prompts, params, lora_request=adapters, use_tqdm=False):
        print(f"[{output.lora_request.lora_name}] {output.outputs[0].text.strip()!r}")
    print(f"asked: {shelf(llm)}")

    # The first name stands for the content of the last for requests from now on; one under way finishes as it began.
    first, last = adapters[0], adapters[-1]
    before = llm.load_report(first.lora_name)["version"]
    llm.enqueue(QUESTION, params, lora_request=first)
    fresh = LoRARequest(first.lora_name, first.lora_int_id, last.lora_path)
    after = engine.replace_lora(fresh, expected_version=before)
    engine.pin_lora(first.lora_int_id)
    (old,) = llm.wait_for_completion(use_tqdm=False)
    (new,) = llm.generate(QUESTION, params, lora_request=fresh, use_tqdm=False)
    print(
        f"replaced {before[:8]} by {after[:8]}: {old.outputs[0].text.strip()!r}, then {new.outputs[0].text.strip()!r}"
    )

    for number in sorted(engine.list_loras()):
        engine.remove_lora(number, mode="drain", timeout=10)
    print(f"unloaded: {shelf(llm)}")


if __name__ == "__main__":
    main()
