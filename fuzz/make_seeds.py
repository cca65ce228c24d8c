"""Write the seed corpora of this folder from the oracle's files: `python fuzz/make_seeds.py`."""

import json
import pathlib
import shutil
import struct

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
SEEDS = HERE / "corpus-seeds"
LARGEST = 8 << 10
SMALL = 3 << 10


def seeds(target):
    """Return a function that writes one seed of a target."""
    folder = SEEDS / target
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return lambda name, content: (folder / name).write_bytes(content)


def adapters():
    """Yield the name, configuration and tensor file of small adapters on the `llama` base, good and bad ones."""
    for parent in (TESTS / "oracle/llama/adapters", TESTS / "oracle/malformed"):
        for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
            files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
            if all(file.is_file() and file.stat().st_size <= LARGEST for file in files):
                yield folder.name, *(file.read_bytes() for file in files)


def compact(text):
    """JSON without the white space that a fuzzer would only waste time on; other text as it is."""
    try:
        return json.dumps(json.loads(text), separators=(",", ":")).encode()
    except ValueError:
        return text


def adapter_seeds():
    """Write the seeds of the three targets that read adapters."""
    config_seed, folder_seed, header_seed = map(seeds, ("adapter_config", "adapter_folder", "safetensors_header"))
    configurations, headers = set(), set()
    for name, config, tensors in adapters():
        config = compact(config)
        if config not in configurations:
            configurations.add(config)
            config_seed(name, config)
        length = int.from_bytes(tensors[:8], "little")
        header, data = tensors[8 : 8 + length], tensors[8 + length :]
        if header not in headers and len(tensors) <= SMALL:
            headers.add(header)
            header_seed(name, tensors)
            folder_seed(name, config + b"\0" + header.rstrip() + b"\0" + data)
    patterns = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8.5,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {r"layers\.[01]\.self_attn\.(q|v)_proj": 2, "lm_head": 1},
        "alpha_pattern": {"^model.*down_proj$": 0.25},
    }
    config_seed("patterns", compact(json.dumps(patterns)))


def config_seeds():
    """Write the seeds of the two targets that read a model's configuration."""
    model_seed, quantization_seed = seeds("model_config"), seeds("quantization_config")
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    bases = [path.parent for path in sorted((TESTS / "oracle").glob("*/base/config.json"))]
    for base in bases:
        given = base / "generation_config.json"
        second = given.read_bytes() if given.exists() else json.dumps(generation)
        model_seed(base.parent.name, compact((base / "config.json").read_bytes()) + b"\0" + compact(second))
    for config in sorted((TESTS / "fixtures/rope").glob("*.config.json")):
        model_seed(
            config.name.removesuffix(".json"), compact(config.read_bytes()) + b"\0" + compact(json.dumps(generation))
        )
    for config in sorted((TESTS / "fixtures/int4").glob("*/config.json")):
        quantization = json.loads(config.read_bytes())["quantization_config"]
        quantization_seed(config.parent.name, compact(json.dumps(quantization)))


def text(value):
    """Pack a GGUF string."""
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def entry(key, value):
    """Pack a GGUF metadata entry."""
    if isinstance(value, bool):
        return text(key) + struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    head = text(key) + struct.pack("<I", 9)
    if isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(text, value))
    code, form = (5, "i") if isinstance(value[0], int) else (6, "f")
    return head + struct.pack(f"<IQ{len(value)}{form}", code, len(value), *value)


def gguf(architecture, dtype, extra):
    """Pack a whole GGUF model of one layer: hidden size 8, two heads, eight tokens (types F32 0, F16 1, BF16 30)."""
    metadata = {
        "general.architecture": architecture,
        "general.name": "tiny",
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": 8,
        f"{architecture}.feed_forward_length": 8,
        f"{architecture}.attention.head_count": 2,
        f"{architecture}.attention.head_count_kv": 1,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "b c", "ab c"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        **extra,
    }
    shapes = {"token_embd.weight": [8, 8], "output_norm.weight": [8], "blk.0.attn_norm.weight": [8]}
    shapes |= {f"blk.0.{name}.weight": [8, 8] for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{name}.weight": [8, 4] for name in ("attn_k", "attn_v")} | {"blk.0.ffn_norm.weight": [8]}
    if architecture == "llama":
        shapes["rope_freqs.weight"] = [2]
    return packed(metadata, shapes, dtype)


def packed(metadata, shapes, dtype):
    """Pack metadata and tensors as a GGUF file."""
    directory, data = b"", b""
    for name, shape in shapes.items():
        kind = 0 if len(shape) == 1 else dtype
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        directory += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += (struct.pack("<f", 1.0) if kind == 0 else b"\0\x3c") * count
        data += b"\0" * (-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items()) + directory
    return head + b"\0" * (-len(head) % 32) + data


def gguf_seeds():
    """Write the seeds of the GGUF target: whole models, small enough to be mutated."""
    seed = seeds("gguf_header")
    seed("llama-f32", gguf("llama", 0, {}))
    seed(
        "qwen2-f16", gguf("qwen2", 1, {"tokenizer.ggml.scores": [0.5] * 8, "tokenizer.chat_template": "{{ messages }}"})
    )
    yarn = {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 2.0, "tokenizer.ggml.model": "llama"}
    seed("qwen3-bf16", gguf("qwen3", 30, yarn))


def vocabulary_seeds():
    """Write the seeds of the GGUF vocabulary target: metadata alone, of both kinds of vocabularies."""
    seed = seeds("gguf_vocabulary")
    byte_level = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<tool>", "h", "e", "l", "o", "Ġ", "he", "ll", "hell", "hello", "a"],
        "tokenizer.ggml.token_type": [3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    seed("byte-level", packed(byte_level, {}, 0))
    pieces = ["▁a", "ab", "▁ab", "▁", "a", "b", "▁a", "aaaa", "aa", "é"]
    sentence_piece = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x41>", "<0xC3>", *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6] + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 5 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }
    seed("sentence-piece", packed(sentence_piece, {}, 0))
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.add_space_prefix"):
        del sentence_piece[key]
    seed("sentence-piece-bare", packed(sentence_piece, {}, 0))


def tokenizer_seeds():
    """Write the seeds of the tokenizer files' target: one real tokenizer cut to few tokens, and other models."""
    seed = seeds("tokenizer_files")
    base = TESTS / "oracle/llama/base"
    whole = json.loads((base / "tokenizer.json").read_bytes())
    kept = ["<s>", "</s>", "h", "e", "l", "he", "ll"]
    whole["model"]["vocab"] = {token: index for index, token in enumerate(kept)}
    whole["model"]["merges"] = [["h", "e"], ["l", "l"]]
    configured = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "additional_special_tokens": ["<tool>"],
        "added_tokens_decoder": {
            "0": {"content": "<s>", "special": True},
            "7": {"content": "<tool>", "special": True, "normalized": False, "rstrip": True},
        },
    }
    models = {
        "bpe": whole["model"],
        "bpe-old-merges": whole["model"] | {"merges": ["h e", "l l"], "continuing_subword_prefix": ""},
        "unigram": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.5], ["b", -2]]},
        "wordpiece": {"type": "WordPiece", "unk_token": "[U]", "vocab": {"[U]": 0, "play": 1, "##ing": 2},
                      "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }  # fmt: skip
    for name, model in models.items():
        files = (whole | {"model": model}, configured, {"unk_token": "<unk>"})
        seed(name, b"\0".join(compact(json.dumps(file)) for file in files))


if __name__ == "__main__":
    adapter_seeds()
    config_seeds()
    gguf_seeds()
    vocabulary_seeds()
    tokenizer_seeds()
