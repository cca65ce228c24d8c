"""Writes the base model as GGUF, for llama.cpp: the same weights as bf16, as f16 (which holds them), or as f32."""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "float16": gguf.GGMLQuantizationType.F16,
    "float32": gguf.GGMLQuantizationType.F32,
}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a bf16 safetensors file, as f32."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    header.pop("__metadata__", None)
    found = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        bits = np.memmap(path, "<u2", "r", start + begin, ((end - begin) // 2,))
        found[name] = (bits.astype(np.uint32) << 16).view(np.float32).reshape(tensor["shape"])
    return found


def stored(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values as they are stored in a tensor of this type."""
    if kind == gguf.GGMLQuantizationType.BF16:
        # They were bf16: nothing is rounded.
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return values.astype(np.float16 if kind == gguf.GGMLQuantizationType.F16 else np.float32)


def write(base: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the model; norms and biases are f32, as llama.cpp wants them."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # Prompts are token ids: there is no tokenizer.
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, values in tensors(base / "model.safetensors").items():
        own = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the file, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("dtype", choices=TYPES)
    arguments = parser.parse_args()
    if not arguments.target.exists():
        part = arguments.target.with_suffix(".part")
        write(arguments.base, part, TYPES[arguments.dtype])
        part.rename(arguments.target)


if __name__ == "__main__":
    main()
