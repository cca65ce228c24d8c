"""Writes the model and the adapters that every peer loads: a real model's shape, random weights, the same each time."""

import argparse
import json
from pathlib import Path

import numpy as np
from shapes import ADAPTERS, COLD_ADAPTERS, RANK, SHAPES, Shape

BYTES = 256


def bf16(values: np.ndarray) -> bytes:
    """Little-endian bf16, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], float | None]], seed: int) -> None:
    """Write bf16 tensors: uniform in +-scale, or ones where the scale is None."""
    header, offset = {}, 0
    for name, (shape, _) in tensors.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for shape, scale in tensors.values():
            if scale is None:
                file.write(bf16(np.ones(shape, np.float32)))
            else:
                file.write(bf16((random.random(shape, np.float32) * 2 - 1) * scale))


def write_model(folder: Path, shape: Shape) -> None:
    """Write the base model with its configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": ((shape.vocab, shape.hidden), 0.05)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ((shape.hidden,), None)
        for name, (outputs, inputs) in shape.linears().items():
            tensors[f"{prefix}.{name}.weight"] = ((outputs, inputs), 1.7 / inputs**0.5)
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                tensors[f"{prefix}.{name}.bias"] = ((outputs,), 0.1)
    tensors["model.norm.weight"] = ((shape.hidden,), None)
    write_safetensors(folder / "model.safetensors", tensors, seed=1)
    end = shape.vocab - 1
    write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "max_window_layers": shape.layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "bos_token_id": end,
            "eos_token_id": end,
        },
    )
    write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    write_tokenizer(folder, shape.vocab)


def byte_characters() -> list[str]:
    """The 256 characters by which byte-level BPE spells bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(BYTES)]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer in which token `i` above the bytes is the word `wi`: any ids can be given as text."""
    end = "<|end|>"
    words = byte_characters() + [f"w{index}" for index in range(BYTES, vocab - 1)]
    added = {
        "id": vocab - 1,
        "content": end,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # A whole word that is in the vocabulary is one token.
        "ignore_merges": True,
        "vocab": {word: index for index, word in enumerate(words)} | {end: vocab - 1},
        "merges": [],
    }
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [spaces, level]},
            "post_processor": None,
            "decoder": level,
            "model": model,
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "bos_token": None,
            "unk_token": None,
            "model_max_length": 4096,
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        },
    )


def write_adapter(folder: Path, shape: Shape, seed: int) -> None:
    """Write a PEFT adapter on all seven linear maps, with an effect."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer in range(shape.layers):
        for name, (outputs, inputs) in shape.linears().items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = ((RANK, inputs), 1 / inputs**0.5)
            tensors[f"{key}.lora_B.weight"] = ((outputs, RANK), 0.05)
    write_safetensors(folder / "adapter_model.safetensors", tensors, seed)
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [name.partition(".")[2] for name in shape.linears()],
            "inference_mode": True,
        },
    )


def write_json(path: Path, value: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")


def main() -> None:
    """Write everything, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="half-billion")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    parts = {"base": lambda folder: write_model(folder, shape)}
    for index in range(ADAPTERS + COLD_ADAPTERS):
        parts[f"adapter-{index}"] = lambda folder, seed=100 + index: write_adapter(folder, shape, seed)
    for name, write in parts.items():
        folder = arguments.folder / name
        # Its name says that it is whole.
        if not folder.exists():
            part = arguments.folder / f"{name}.part"
            write(part)
            part.rename(folder)


if __name__ == "__main__":
    main()
