"""`manylora merge`: what is written computes what the engine computes with adapters beside the base."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import manylora
from conftest import BASES, ORACLE, MakeEngine, adapter_path, greedy, logits_of
from manylora import LLM, LoRARequest, _core
from manylora.cli import main
from manylora.exceptions import AdapterError, ModelError, ValidationError
from oracle.oracle_check import Oracle
from test_oracle import REFUSED

GetOracle = Callable[[str], Oracle]
FIXTURES = Path(__file__).parent / "fixtures"
ENGINE: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "use_tqdm_on_load": False}


def base_path(base: str) -> str:
    return str(ORACLE / base / "base")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a checkpoint in float64, whatever their format and however many files they are in."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
            for name in opened.keys():  # noqa: SIM118
                if header[name]["dtype"] == "BF16":
                    start, end = header[name]["data_offsets"]
                    data = file.read_bytes()[8 + int.from_bytes(file.read_bytes()[:8], "little") :][start:end]
                    bits = np.frombuffer(data, "<u2").astype("u4") << 16
                    found[name] = bits.view("f4").reshape(header[name]["shape"]).astype("f8")
                else:
                    found[name] = opened.get_tensor(name).astype("f8")
    return found


def merged(tmp_path: Path, base: str, adapters: str | Sequence[str], **options: Any) -> Path:
    output = tmp_path / "merged"
    manylora.merge(base, adapters, output, use_tqdm=False, overwrite=True, **options)
    return output


@pytest.mark.parametrize("base", BASES)
def test_float32_equals_the_oracles_unmerged_logits(base: str, tmp_path: Path, oracle: GetOracle) -> None:
    """Every adapter that the engine loads, heads and embeddings of tied bases among them."""
    expected = oracle(base)
    cases: dict[str, list[tuple[str, list[int]]]] = {}
    for adapter, prompt, ids in expected.cases():
        if adapter is not None and adapter not in REFUSED.get(base, ()):
            cases.setdefault(adapter, []).append((prompt, ids))
    config = json.loads((Path(base_path(base)) / "config.json").read_text())
    ends = 0
    for adapter, prompts in cases.items():
        output = merged(tmp_path, base_path(base), adapter_path(adapter, base), dtype="float32")
        untied = json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False
        touches_ends = any("lm_head" in key or "embed" in key for key in tensors_of_adapter(adapter, base))
        assert untied == (touches_ends or not config.get("tie_word_embeddings", False)), adapter
        ends += touches_ends
        with LLM(str(output), dtype="float32", **ENGINE) as llm:
            for prompt, ids in prompts:
                expected.compare_logits(adapter, prompt, logits_of(llm, ids))
    assert len(cases) >= 3
    assert ends >= (4 if base == "llama-tied" else 0)


def tensors_of_adapter(adapter: str, base: str) -> list[str]:
    with safe_open(Path(adapter_path(adapter, base)) / "adapter_model.safetensors", "numpy") as opened:
        return list(opened.keys())


@pytest.mark.parametrize("base", BASES)
def test_bfloat16_is_within_twice_pefts_own_error(base: str, tmp_path: Path, oracle: GetOracle) -> None:
    """PEFT's error, of the base in bf16 with `alpha` beside it against float32, is in the oracle's manifest."""
    expected = oracle(base)
    allowed = 2 * expected.m["tolerances"]["peft_half_precision_max_logit_error"]["bf16"]["alpha"]
    output = merged(tmp_path, base_path(base), adapter_path("alpha", base), dtype="bfloat16")
    # Its weights alone, computed exactly; and as they would be served.
    for dtype in ("float32", "bfloat16"):
        with LLM(str(output), dtype=dtype, **ENGINE) as llm:
            for adapter, prompt, ids in expected.cases():
                if adapter == "alpha":
                    difference = expected.compare_logits("alpha", prompt, logits_of(llm, ids), tol=allowed)
                    assert difference > 0 or dtype == "float32"


# Bits of a number's significand, and the exponent of the least normal one.
FORMATS = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_every_number_is_the_exact_sum_rounded_once(dtype: str, tmp_path: Path) -> None:
    """Against numpy's float64, for two adapters with weights, one of them on head and embedding."""
    weights = {"alpha": 0.75, "embed-head": -1.25}
    output = merged(
        tmp_path,
        base_path("llama"),
        [adapter_path(name) for name in weights],
        weights=list(weights.values()),
        dtype=dtype,
    )
    wanted = {name: value.astype("f8") for name, value in load_file(f"{base_path('llama')}/model.safetensors").items()}
    for name, weight in weights.items():
        config = json.loads((Path(adapter_path(name)) / "adapter_config.json").read_text())
        scale = float(np.float32(config["lora_alpha"] / config["r"]) * np.float32(weight))
        stored = load_file(Path(adapter_path(name)) / "adapter_model.safetensors")
        for key, a in stored.items():
            module = key.removeprefix("base_model.model.")
            if key.endswith("lora_A.weight"):
                b = stored[key.replace("lora_A", "lora_B")]
                wanted[module.replace("lora_A.weight", "weight")] += scale * (b.astype("f8") @ a.astype("f8"))
            elif key.endswith("lora_embedding_A"):
                b = stored[key.replace("_A", "_B")]
                wanted[module.replace("lora_embedding_A", "weight")] += scale * (b.astype("f8") @ a.astype("f8")).T
    found = tensors_of(output)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        bits, least = FORMATS[dtype]
        # Half a unit in the last place, and what numpy's order of summing differs by.
        half = np.exp2(np.maximum(np.frexp(wanted[name])[1] - 1, least) - bits)
        assert (np.abs(value - wanted[name]) <= half * (1 + 1e-6)).all(), name


@pytest.mark.parametrize("mix", ["alpha*0.5+beta*2", "alpha+beta"])
def test_several_adapters_are_a_request_that_composes_them(
    mix: str, tmp_path: Path, oracle: GetOracle, make_engine: MakeEngine
) -> None:
    expected = oracle("llama")
    parts = [("alpha", 0.5), ("beta", 2.0)] if "*" in mix else [("alpha", 1.0), ("beta", 1.0)]
    output = merged(
        tmp_path, base_path("llama"), [adapter_path(name) for name, _ in parts],
        weights=[weight for _, weight in parts], dtype="float32",
    )  # fmt: skip
    together = make_engine("llama")
    for number, (name, _) in enumerate(parts, start=1):
        together.llm_engine.add_lora(LoRARequest(name, number, adapter_path(name)))
    with LLM(str(output), dtype="float32", **ENGINE) as llm:
        for prompt in ("mid", "long"):
            ids = expected.m["prompts"][prompt]["ids"]
            wanted = np.from_dlpack(together.llm_engine.core.logits(ids, parts))
            assert np.abs(logits_of(llm, ids) - wanted).max() <= 1e-4
            assert np.abs(wanted - logits_of(together, ids)).max() > 0.05


def test_the_oracles_compositions(tmp_path: Path, oracle: GetOracle) -> None:
    expected = oracle("llama")
    compared = 0
    for name, mix in expected.m["composition"]["mixes"].items():
        paths = [adapter_path(part) for part, _ in mix["parts"]]
        output = merged(
            tmp_path, base_path("llama"), paths, weights=[weight for _, weight in mix["parts"]], dtype="float32"
        )
        with LLM(str(output), dtype="float32", **ENGINE) as llm:
            for prompt, one in mix["expect_by_prompt"].items():
                got = logits_of(llm, expected.m["prompts"][prompt]["ids"])[one["logit_positions"]]
                want = expected.a[f"mix:{name}/{prompt}/logits"]
                assert np.abs(got - want).max() <= 1e-4, (name, prompt)
                compared += 1
    assert compared >= 6


def make_factors(folder: Path, sizes: dict[str, tuple[int, int]], rank: int = 3) -> str:
    """An adapter for a base of any sizes: (outputs, inputs) by module."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": sorted({one.rsplit(".", 1)[-1] for one in sizes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(7)
    tensors = {}
    for module, (output, width) in sizes.items():
        stem = f"base_model.model.{module}"
        a, b = generator.normal(0, 0.3, (rank, width)), generator.normal(0, 0.3, (output, rank))
        if module.endswith("embed_tokens"):
            tensors |= {f"{stem}.lora_embedding_A": a, f"{stem}.lora_embedding_B": b}
        else:
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file({key: value.astype("f4") for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    return str(folder)


def compare_with_unmerged(base: str, adapter: str, output: Path, ids: list[int], **options: Any) -> None:
    with LLM(base, dtype="float32", enable_lora=True, **ENGINE, **options) as beside:
        alone = logits_of(beside, ids)
        beside.llm_engine.add_lora(LoRARequest("a", 1, adapter))
        wanted = logits_of(beside, ids, "a")
    with LLM(str(output), dtype="float32", **ENGINE, **options) as llm:
        assert np.abs(logits_of(llm, ids) - wanted).max() <= 1e-4
    assert np.abs(wanted - alone).max() > 0.05


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_bases_become_folders_that_say_the_same(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = str(FIXTURES / "gguf-models" / f"{name}.gguf")
    head = 32 if name == "qwen3" else 16
    sizes = {
        "model.layers.0.self_attn.q_proj": (4 * head, 64), "model.layers.1.self_attn.k_proj": (2 * head, 64),
        "model.layers.1.mlp.down_proj": (64, 96), "model.embed_tokens": (64, 288), "lm_head": (288, 64),
    }  # fmt: skip
    adapter = make_factors(tmp_path / "adapter", sizes)
    output = tmp_path / "merged"
    assert main(["merge", base, adapter, str(output), "--dtype", "float32"]) == 0
    told = capfd.readouterr().err
    assert "dequantized at load" in told
    assert ("they are two now" in told) == (name in ("llama3", "qwen2"))
    compare_with_unmerged(base, adapter, output, [5 + 7 * i % 280 for i in range(90)])
    text, conversation = "Hello, wörld! 12 + 30\n", [{"role": "user", "content": "Hi"}]
    with LLM(base, dtype="float32", **ENGINE) as before, LLM(str(output), dtype="float32", **ENGINE) as after:
        said = [
            (
                core.encode(text, True),
                core.decode(core.encode(text, False), True),
                core.eos_token_id(),
                core.render_chat(json.dumps(conversation)),
                json.loads(core.info().generation),
                core.info().max_model_len,
            )
            for core in (before.llm_engine.core, after.llm_engine.core)
        ]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-act-order", "ct-group", "ct-8bit"])
def test_int4_bases_are_dequantized(name: str, tmp_path: Path) -> None:
    base = str(FIXTURES / "int4" / name)
    config = json.loads((Path(base) / "config.json").read_text())
    hidden = config["hidden_size"]
    sizes = {"model.layers.0.self_attn.q_proj": (hidden, hidden), "lm_head": (config["vocab_size"], hidden)}
    adapter = make_factors(tmp_path / "adapter", sizes)
    output = tmp_path / "merged"
    found = manylora.merge(base, adapter, output, dtype="float32", use_tqdm=False)
    assert any("dequantized" in note for note in found.notes)
    written = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in written
    assert {written[key] for key in ("dtype", "torch_dtype") if key in written} == {"float32"}
    compare_with_unmerged(base, adapter, output, [1 + 3 * i % 60 for i in range(40)], skip_tokenizer_init=True)


def test_files_of_weights_and_what_lies_beside_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = merged(tmp_path, base_path("llama"), adapter_path("alpha"))
    assert (whole / "model.safetensors").is_file()
    assert not (whole / "model.safetensors.index.json").exists()
    output = tmp_path / "parts"
    line = ["merge", base_path("llama"), adapter_path("alpha"), str(output), "--max-shard-size", "40k", "--json"]
    assert main(line) == 0
    found = json.loads(capfd.readouterr().out)
    files = sorted(path.name for path in output.glob("model-*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) == found["shards"] >= 3
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found["bytes"]
    for name, file in index["weight_map"].items():
        with safe_open(output / file, "numpy") as opened:
            assert name in opened.keys()  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}
    one, many = tensors_of(whole), tensors_of(output)
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all((one[name] == many[name]).all() for name in one)
    # Of the base's own, everything but what describes its weights.
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (output / name).read_bytes() == (Path(base_path("llama")) / name).read_bytes()
    config = json.loads((output / "config.json").read_text())
    assert config == json.loads((Path(base_path("llama")) / "config.json").read_text()) | {
        "tie_word_embeddings": False, **{key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    }  # fmt: skip


def test_what_is_written_is_a_base_like_any_other(tmp_path: Path) -> None:
    """Text in, text out, and the next adapter on top."""
    output = merged(tmp_path, base_path("llama-tied"), adapter_path("head-only", "llama-tied"), dtype="bfloat16")
    with LLM(str(output), enable_lora=True, **ENGINE) as llm:
        request = LoRARequest("alpha", 1, adapter_path("alpha", "llama-tied"))
        plain, adapted = (
            llm.generate("Hello", greedy(8), use_tqdm=False, lora_request=one)[0] for one in (None, request)
        )
        assert len(plain.outputs[0].token_ids) == len(adapted.outputs[0].token_ids) == 8


def test_nothing_is_left_of_what_fails_or_is_refused(tmp_path: Path, make_adapter: Callable[..., str]) -> None:
    alpha, output = adapter_path("alpha"), tmp_path / "out"
    with pytest.raises(AdapterError, match="DoRA"):
        manylora.merge(base_path("llama"), [alpha, adapter_path("dora")], output, use_tqdm=False)
    with pytest.raises(ModelError, match="beyond float16's range"):
        manylora.merge(base_path("llama"), alpha, output, weights=[1e8], dtype="float16", use_tqdm=False)
    output.mkdir()
    assert manylora.merge(base_path("llama"), alpha, output, use_tqdm=False).changed == 14
    with pytest.raises(ValidationError, match="there already"):
        manylora.merge(base_path("llama"), alpha, output, use_tqdm=False)
    before = (output / "model.safetensors").read_bytes()

    def stop(done: int, total: int) -> None:
        assert 0 < done <= total
        raise KeyboardInterrupt

    wanted = {
        "base": base_path("llama"), "base_names": [], "adapters": [(alpha, 2.0)], "output": str(output),
        "dtype": "auto", "max_shard_bytes": 1 << 20, "overwrite": True,
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        _core.merge(wanted, stop)
    assert (output / "model.safetensors").read_bytes() == before
    manylora.merge(base_path("llama"), alpha, output, weights=[2.0], overwrite=True, use_tqdm=False)
    assert (output / "model.safetensors").read_bytes() != before
    assert os.listdir(tmp_path) == ["out"]


def test_weight_0_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    output = merged(tmp_path, base_path("llama-tied"), adapter_path("embed-head", "llama-tied"), weights=[0.0])
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is True
    stored = {}
    for file in Path(base_path("llama-tied")).glob("*.safetensors"):
        stored |= load_file(file)
    found = tensors_of(output)
    assert all((found[name] == stored[name]).all() for name in found)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 200 MB with an adapter on each matrix: the process takes far less than that."""
    hidden, intermediate, vocabulary, layers = 1024, 4096, 8192, 2
    base = tmp_path / "base"
    shutil.copytree(base_path("llama"), base)
    config = json.loads((base / "config.json").read_text()) | {
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocabulary, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False, "head_dim": 64,
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{one}_proj": (hidden, hidden) for one in "qkvo"}
        shapes |= {f"{stem}.mlp.{one}_proj": (intermediate, hidden) for one in ("gate", "up")}
        shapes[f"{stem}.mlp.down_proj"] = (hidden, intermediate)
    tensors = {f"{name}.weight": np.full(shape, 0.01, "f4") for name, shape in shapes.items()}
    norms = [
        "model.norm",
        *(f"model.layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention")),
    ]
    save_file(tensors | {f"{name}.weight": np.ones(hidden, "f4") for name in norms}, base / "model.safetensors")
    size = (base / "model.safetensors").stat().st_size
    assert size > 190e6
    adapter = make_factors(
        tmp_path / "adapter", {name: (out, into) for name, (out, into) in shapes.items() if "embed" not in name}, rank=8
    )
    script = (
        "import resource, sys, manylora\n"
        "used = lambda: next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "before, most = used(), 0\n"
        "import manylora.merging as m\n"
        "m._shown_by = lambda bar: lambda done, total: globals().__setitem__('most', max(most, used()))\n"
        "manylora.merge(sys.argv[1], sys.argv[2], sys.argv[3], use_tqdm=False)\n"
        "print(1024 * (most - before))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(base), adapter, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < int(ran.stdout) < 100e6
    assert (tmp_path / "out/model.safetensors").stat().st_size == pytest.approx(size, rel=0.01)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Interrupted in the middle, which is looked at while it stands still."""
    slow = (
        "import sys, time\n"
        "import manylora.merging as m\n"
        "from manylora.cli import main\n"
        "def show(done, total):\n"
        "    print(done, flush=True)\n"
        "    time.sleep(0.05)\n"
        "m._shown_by = lambda bar: show\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["merge", base_path("llama"), adapter_path("alpha"), str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 0
    (partial,) = os.listdir(tmp_path)
    assert partial.startswith(".out.merging-")
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, "manylora: interrupted\n"), time.monotonic() - begun
    assert os.listdir(tmp_path) == []
