"""What adapter folders bring along beside their tensors, and what adapters do not go with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from manylora import LLM, LoRARequest, SamplingParams

from .conftest import ADAPTERS, ORACLE, PROMPT, Server, StartServer, events
from .test_metrics import Page
from .test_starting import serve

BASE = ORACLE / "llama" / "base"
MESSAGES = [{"role": "user", "content": "How many?"}]
ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def test_a_47_the_base_decides_template_end_tokens_and_defaults(start_server: StartServer, tmp_path: Path) -> None:
    own = Path(shutil.copytree(ADAPTERS / "alpha", tmp_path / "own"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / file, own)
    config = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ 'other' }}"}))
    # By these every token is an end, and answers are drawn at random.
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 288)), "temperature": 2.0}))
    server = start_server("--lora-modules", f"own={own}", f"alpha={ADAPTERS / 'alpha'}")
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12}),
    ):
        answers = [server.post(path, body | {"model": name}).json() for name in ("own", "alpha")]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
        assert answers[0]["usage"]["completion_tokens"] > 1
    told = [
        server.post("/tokenize", {"model": name, "messages": MESSAGES}).json()["tokens"] for name in ("own", "base")
    ]
    assert told[0] == told[1]


def test_a_47_a_base_without_a_template_says_what_to_do(start_server: StartServer, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(BASE, tmp_path / "bare"))
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    own = Path(shutil.copytree(ADAPTERS / "alpha", tmp_path / "own"))
    shutil.copy(BASE / "tokenizer_config.json", own)
    server = start_server("--lora-modules", f"own={own}", base=str(bare))
    for model in ("base", "own"):
        answer = server.post("/v1/chat/completions", CHAT | {"model": model})
        assert answer.status_code == 400, answer.text
        assert "template" in answer.json()["error"]["message"]
        assert server.text(model)


def test_a_47_500_registered_adapters_cost_the_start_nothing(start_server: StartServer, tmp_path: Path) -> None:
    manifest = tmp_path / "adapters.yaml"
    entries = []
    for number in range(500):
        folder = tmp_path / f"a{number}"
        folder.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(ADAPTERS / "alpha" / file, folder)
        # Some bring a tokenizer, of which nothing is read, and most have none.
        if number % 7 == 0:
            (folder / "tokenizer.json").write_text("no tokenizer at all")
        entries.append({"name": f"tenant/{number}", "path": folder.name})
    manifest.write_text(json.dumps(entries))
    server = start_server("--lora-manifest", str(manifest), "--lora-modules", f"alpha={ADAPTERS / 'alpha'}")
    assert len(server.ids()) == 502
    assert Page(server).value("manylora:adapter_loads_total") == 0
    expected = server.text("alpha")
    for number in (0, 1, 499):
        assert server.text(f"tenant/{number}") == expected
    assert Page(server).value("manylora:adapter_load_seconds_count") == 4


@pytest.mark.parametrize("model", ["base", "alpha"])
def test_a_47_stops_are_the_same_for_base_and_adapter_streamed_or_not(server: Server, model: str) -> None:
    text = server.text(model, max_tokens=24)
    pieces = [text[at : at + length] for length in (1, 2, 5) for at in (3, 7)]
    for stop in [piece for piece in pieces if piece.isascii()] or [text[3:8]]:
        for included in (False, True):
            fields = {"stop": [stop], "max_tokens": 24, "include_stop_str_in_output": included}
            whole = server.complete(model, **fields).json()["choices"][0]
            end = text.index(stop) + (len(stop) if included else 0)
            assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (text[:end], "stop", stop)
            chunks = events(server.complete(model, **fields, stream=True).text)[:-1]
            choices = [chunk["choices"][0] for chunk in chunks]
            assert "".join(choice["text"] for choice in choices) == text[:end]
            assert choices[-1]["stop_reason"] == stop


@pytest.mark.parametrize("model", ["base", "alpha"])
def test_a_47_special_tokens_stop_as_text(server: Server, model: str) -> None:
    """A special token is not shown, and yet found where a request asks for its text."""
    special = "<|im_start|>"
    # Nothing but the special token can come.
    forced = {"allowed_token_ids": [1], "max_tokens": 4, "skip_special_tokens": False}
    shown = server.complete(model, **forced).json()["choices"][0]
    assert shown["text"] == special * 4
    stopped = server.complete(model, **forced, stop=[special]).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", special)
    by_id = server.complete(model, allowed_token_ids=[1], max_tokens=4, stop_token_ids=[1]).json()["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", 1)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'], "speculative"),
        (["--enable-sleep-mode"], "sleep"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size"),
        (["--enable-mixed-moe-lora-format"], "mixed"),
        (["--fully-sharded-loras"], "sharded"),
    ],
)
def test_a_56_what_adapters_do_not_go_with_is_refused_at_the_start(flags: list[str], told: str) -> None:
    done = serve(str(BASE), "--device", "cpu", "--lora-modules", f"alpha={ADAPTERS / 'alpha'}", *flags)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_a_56_what_no_base_goes_with_is_refused_at_the_load(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(folder=tmp_path, **ON)
    config = json.loads((ADAPTERS / "alpha" / "adapter_config.json").read_text())
    for key, value in {
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "lora_bias": True,
        "trainable_token_indices": [1],
        "alora_invocation_tokens": [1],
        "init_lora_weights": "pissa",
        "layer_replication": [[0, 2]],
        "use_qalora": True,
    }.items():
        folder = Path(shutil.copytree(ADAPTERS / "alpha", tmp_path / key))
        (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        answer = server.load(key, key)
        assert answer.status_code == 400, (key, answer.text)
        assert key in answer.json()["error"]["message"], answer.text
        assert server.complete(key).status_code == 404
    assert server.ids() == ["base"]


def test_a_56_a_quantized_base_serves_adapters(start_server: StartServer, tmp_path: Path) -> None:
    """A pair that the table supports: full-precision factors over weights that are stored in four and five bits."""
    source = np.random.default_rng(56)
    tensors = {}
    for layer in range(2):
        for place, size in (("self_attn.q_proj", 64), ("mlp.up_proj", 96)):
            key = f"base_model.model.model.layers.{layer}.{place}.lora_"
            tensors[f"{key}A.weight"] = source.normal(0, 0.5, (3, 64)).astype("f4")
            tensors[f"{key}B.weight"] = source.normal(0, 0.5, (size, 3)).astype("f4")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = Path(__file__).parent.parent / "fixtures" / "gguf-models" / "llama.gguf"
    server = start_server("--lora-modules", f"own={tmp_path}", base=str(model))
    base, adapted = server.text("base", max_tokens=32), server.text("own", max_tokens=32)
    assert adapted != base
    assert server.text("own", max_tokens=32, lora_scale=0) == base
    with LLM(str(model), device="cpu", dtype="float32", enable_lora=True, kv_cache_memory_bytes=32 << 20) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        request = LoRARequest("own", 1, str(tmp_path))
        outputs = llm.generate([PROMPT] * 2, params, use_tqdm=False, lora_request=[None, request])
    assert [output.outputs[0].text for output in outputs] == [base, adapted]
