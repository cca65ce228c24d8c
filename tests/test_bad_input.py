"""Bad input: an exception of the right class that names the thing, and an engine that lives on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ORACLE, MakeEngine, greedy
from manylora import LLM, ManyLoRAError, SamplingParams, ValidationError
from manylora.exceptions import HubError, ModelError, ModelNotFoundError

BASE = ORACLE / "llama" / "base"


def changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def truncated(name: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


MODELS: list[tuple[str, Callable[[Path], None], str]] = [
    ("no config", without("config.json"), "config.json"),
    ("no weights", without("model.safetensors"), "safetensors"),
    ("no tokenizer", without("tokenizer.json"), "tokenizer"),
    ("half the weights", truncated("model.safetensors", 0.5), "model.safetensors"),
    ("no weights in the file", truncated("model.safetensors", 0), "model.safetensors"),
    ("a huge header", replaced("model.safetensors", b"\xff" * 8 + b"{}"), "model.safetensors"),
    ("half a config", truncated("config.json", 0.5), "config.json"),
    ("half a tokenizer", truncated("tokenizer.json", 0.5), "tokenizer"),
    ("an unknown architecture", changed(architectures=["GPT2LMHeadModel"], model_type="gpt2"), "GPT2LMHeadModel|gpt2"),
    ("another hidden size", changed(hidden_size=64), "shape"),
    ("more layers than weights", changed(num_hidden_layers=3), "layers.2"),
    ("no vocabulary", changed(vocab_size=0), "vocab_size"),
    ("an absurd size", changed(hidden_size=2**40), "hidden_size|bytes"),
    ("an unknown rope", changed(rope_scaling={"rope_type": "spiral", "factor": 2}), "spiral"),
]


@pytest.mark.parametrize(("change", "names"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_a_broken_model_is_refused_by_name(
    change: Callable[[Path], None], names: str, tmp_path: Path, make_engine: MakeEngine
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    change(folder)
    with pytest.raises(ModelError, match=names):
        make_engine(str(folder))


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "nothing", "./nothing", "~/surely/nothing/here"):
        with pytest.raises(ModelNotFoundError, match="nothing") as missing:
            LLM(str(path), use_tqdm_on_load=False)
        assert isinstance(missing.value, FileNotFoundError)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="`no-such-owner/no-such-model`"):
        LLM("no-such-owner/no-such-model", use_tqdm_on_load=False)
    with pytest.raises(ModelError):
        LLM(str(BASE / "config.json"), use_tqdm_on_load=False)
    with pytest.raises(ValidationError, match="model must be"):
        LLM(None)
    with pytest.raises(ValidationError, match="neither a template text nor a file"):
        LLM(str(BASE), chat_template="/no/such/template.jinja", use_tqdm_on_load=False)


PROMPTS: list[tuple[Any, str]] = [
    ([288], "Token id `288` is out of vocabulary"),
    ([5, 10**6], "Token id `1000000` is out of vocabulary"),
    ([[5, -1]], "Token id -1 is out of vocabulary"),
    ([[5, 2**40]], "out of vocabulary"),
    ([[]], "The prompt is empty"),
    ("", "The prompt is empty"),
    ({"prompt_token_ids": []}, "The prompt is empty"),
    ([5] * 512, "maximum context length is 512 tokens.* has 512 input tokens.*max_model_len"),
    ([5] * 5000, "maximum context length is 512 tokens.* has 5000 input tokens.*max_model_len"),
    (None, "prompts must be text"),
    (5, "prompts must be text"),
    ([None], "a prompt must be text"),
    ([5.5], "a prompt must be text"),
    ([[5.5]], "token ids must be integers, got 5.5"),
    ([["a"]], "token ids must be integers, got 'a'"),
    ([[True]], "token ids must be integers, got True"),
    ({"text": "hello"}, "prompts with `text` are not supported.*the keys are prompt, prompt_token_ids, cache_salt"),
    ({"cache_salt": "a"}, r"needs `prompt` or `prompt_token_ids`, got keys \['cache_salt'\]"),
    ({"prompt": 5}, "`prompt` of a prompt dictionary must be text"),
    ({"prompt_token_ids": "abc"}, "token ids must be a list of integers"),
    ({"prompt_embeds": [[0.1]]}, "prompt_embeds"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
]

PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 21}, "logprobs of 21, which is greater than max allowed: 20"),
    ({"logprobs": -1}, "logprobs of 288, which is greater than max allowed: 20"),
    ({"prompt_logprobs": 30}, "logprobs of 30, which is greater than max allowed: 20"),
    ({"n": 100_000}, "n must be at most 16384, got 100000"),
    ({"logit_bias": {288: 1}}, r"\[288\] in logit_bias contain out-of-vocab"),
    ({"stop_token_ids": [4000]}, r"\[4000\] in stop_token_ids contain out-of-vocab"),
    ({"allowed_token_ids": [4, 300]}, r"\[300\] in allowed_token_ids contain out-of-vocab"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[str(case[0])[:30] for case in PROMPTS])
def test_a_bad_prompt_is_refused_before_anything_runs(prompt: Any, message: str, llm: LLM) -> None:
    with pytest.raises(ValidationError, match=message):
        llm.generate(prompt, greedy(2), use_tqdm=False)
    stats = llm.llm_engine.stats()
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (0, 0, stats["total_blocks"])
    assert llm.generate([5], greedy(2), use_tqdm=False)


@pytest.mark.parametrize(("fields", "message"), PARAMS, ids=[str(case[0])[:30] for case in PARAMS])
def test_bad_parameters_are_refused_by_the_engine(fields: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(ValidationError, match=message):
        llm.generate([5], SamplingParams(**fields), use_tqdm=False)
    assert llm.generate([5], greedy(2), use_tqdm=False)


def test_one_bad_prompt_stops_the_whole_call(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="out of vocabulary"):
        llm.generate([[5], [6], [999]], greedy(2), use_tqdm=False)
    stats = llm.llm_engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_other_arguments_of_generate_are_checked(llm: LLM) -> None:
    for arguments, message in (
        ({"sampling_params": {"temperature": 0}}, "sampling_params must be SamplingParams, got dict"),
        ({"sampling_params": [greedy(1), "x"]}, "sampling_params must be SamplingParams, got str"),
        ({"lora_request": "alpha"}, "lora_request must be LoRARequest or None, got str"),
        ({"priority": 1}, "Got priority 1 but priority scheduling is not enabled"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"priority": 2**63}, "priority must be an integer"),
        ({"tokenization_kwargs": {"truncation": True}}, "truncation"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ):
        with pytest.raises(ValidationError, match=message):
            llm.generate([[5], [6]], use_tqdm=False, **arguments)
    late = greedy(2)
    late.max_tokens = "many"
    with pytest.raises(ValidationError, match="max_tokens"):
        llm.generate([5], late, use_tqdm=False)


def test_long_answers_end_at_the_context(llm: LLM) -> None:
    (output,) = llm.generate([5] * 500, greedy(100), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate([5] * 500, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12


def test_a_request_that_can_never_fit_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ManyLoRAError):
        make_engine(kv_cache_memory_bytes=100)


def test_chat_without_a_template_says_so(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(BASE, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm = make_engine(str(folder))
    with pytest.raises(ManyLoRAError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(1), use_tqdm=False)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert llm.chat([{"role": "user", "content": "hi"}], greedy(1), use_tqdm=False, chat_template=template)
    with pytest.raises(ManyLoRAError, match="template"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(1), use_tqdm=False, chat_template="{% for %}")
    raising = "{{ raise_exception('no such role') }}"
    with pytest.raises(ManyLoRAError, match="no such role"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(1), use_tqdm=False, chat_template=raising)
