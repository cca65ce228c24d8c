"""`LLMEngine`, `EngineArgs` and the module paths, driven as vLLM's examples drive them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import manylora
from manylora import AsyncEngineArgs, EngineArgs, LLMEngine, RequestOutput, SamplingParams, ValidationError
from manylora.arguments import ARGUMENTS
from manylora.exceptions import EngineStoppedError
from manylora.flags import FlagParser
from manylora.lora.request import LoRARequest
from manylora.sampling_params import RequestOutputKind

ORACLE = Path(__file__).parent.parent / "oracle"
BASE = str(ORACLE / "llama" / "base")
PROMPT = [5, 40, 99, 7, 130]
ARGUMENTS_OF_TESTS: dict[str, Any] = {
    "model": BASE,
    "device": "cpu",
    "dtype": "float32",
    "enable_lora": True,
    "max_lora_rank": 64,
    "kv_cache_memory_bytes": 32 << 20,
    "use_tqdm_on_load": False,
}


def lora(name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, str(ORACLE / "llama" / "adapters" / name))


def greedy(count: int = 8, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=kind, **fields)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(EngineArgs(**ARGUMENTS_OF_TESTS))
    yield engine
    engine.shutdown()


def all_outputs(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        came = engine.step()
        assert came
        for output in came:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_the_example_with_many_adapters(engine: LLMEngine) -> None:
    """As vLLM's own example does: one request more before each step, base and adapters mixed, some of them random."""
    sql = str(ORACLE / "llama" / "adapters" / "alpha")
    waiting: list[tuple[str, SamplingParams, LoRARequest | None]] = [
        ("A robot may not injure", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=24), None),
        (
            "To be or not to be,",
            SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=24),
            None,
        ),
        (
            "[user] Which rows? [assistant]",
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=24, stop_token_ids=[203]),
            LoRARequest("sql-lora", 1, sql),
        ),
        (
            "[user] Which rows? [assistant]",
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=24, stop_token_ids=[203]),
            LoRARequest("sql-lora2", 2, sql),
        ),
    ]
    finished: dict[str, RequestOutput] = {}
    request_id = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params, request = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params, lora_request=request)
            request_id += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                finished[output.request_id] = output
    assert sorted(finished) == ["0", "1", "2", "3"]
    assert [finished[key].lora_request and finished[key].lora_request.lora_name for key in sorted(finished)] == [
        None, None, "sql-lora", "sql-lora2",
    ]  # fmt: skip
    # One content under two names.
    two, three = finished["2"].outputs[0], finished["3"].outputs[0]
    assert (two.token_ids, two.text, two.logprobs) == (three.token_ids, three.text, three.logprobs)
    assert two.token_ids != finished["0"].outputs[0].token_ids
    assert finished["0"].prompt == "A robot may not injure"
    assert len(finished["0"].prompt_logprobs or []) == len(finished["0"].prompt_token_ids)
    for key in (1, 2):
        assert engine.remove_lora(key)


def test_outputs_are_of_the_kind_that_was_asked_for(engine: LLMEngine) -> None:
    alpha = lora("alpha", 1)
    kinds = {kind.name: kind for kind in RequestOutputKind}
    for name, kind in kinds.items():
        engine.add_request(name, PROMPT, greedy(480, kind, logprobs=1, prompt_logprobs=0), lora_request=alpha)
    assert engine.get_num_unfinished_requests() == 3
    outputs = all_outputs(engine)
    (final,) = outputs["FINAL_ONLY"]
    sample = final.outputs[0]
    assert final.finished
    assert len(sample.token_ids) == 480
    assert final.lora_request is alpha

    cumulative = outputs["CUMULATIVE"]
    assert len(cumulative) > 1
    assert [len(item.outputs[0].token_ids) for item in cumulative] == sorted(
        {len(item.outputs[0].token_ids) for item in cumulative}
    )
    for item in cumulative:
        came = len(item.outputs[0].token_ids)
        assert item.outputs[0].token_ids == sample.token_ids[:came]
        assert sample.text.startswith(item.outputs[0].text)
        assert item.finished == (item is cumulative[-1]) == (item.outputs[0].finish_reason == "length")
        assert item.prompt_logprobs == final.prompt_logprobs
    assert cumulative[-1].outputs[0].logprobs == sample.logprobs
    assert cumulative[-1].outputs[0].cumulative_logprob == pytest.approx(sample.cumulative_logprob, rel=1e-12)

    deltas = [item.outputs[0] for item in outputs["DELTA"]]
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == sample.text
    assert [token for delta in deltas for token in delta.token_ids] == sample.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs or []] == sample.logprobs
    assert [item.prompt_logprobs is not None for item in outputs["DELTA"]] == [True] + [False] * (len(deltas) - 1)


def test_samples_of_one_request(engine: LLMEngine) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True}
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPT, SamplingParams(**params, output_kind=kind))
    outputs = all_outputs(engine)
    (final,) = outputs["FINAL_ONLY"]
    expected = [sample.token_ids for sample in final.outputs]
    assert [sample.index for sample in final.outputs] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [sample.token_ids for sample in outputs["CUMULATIVE"][-1].outputs] == expected
    joined: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for item in outputs["DELTA"]:
        for sample in item.outputs:
            joined[sample.index] += sample.token_ids
    assert list(joined.values()) == expected


def test_an_aborted_request_brings_nothing_more(engine: LLMEngine) -> None:
    before = engine.stats()["steps"]
    for name, count in (("long", 500), ("short", 4), ("other", 500)):
        params = SamplingParams(n=16, max_tokens=count, ignore_eos=True, seed=1)
        engine.add_request(name, PROMPT, params)
    engine.step()
    engine.abort_request(["long", "other", "no such request"])
    assert set(all_outputs(engine)) <= {"short"}
    # Gone from the engine too, not only from sight.
    while engine.stats()["running"]:
        time.sleep(0.005)
    assert engine.stats()["steps"] - before < 400
    assert engine.step() == []
    engine.add_request("long", PROMPT, greedy(2))
    engine.abort_request("long")
    assert not engine.has_unfinished_requests()


def test_what_is_wrong_is_refused_before_anything_runs(engine: LLMEngine) -> None:
    engine.add_request("taken", PROMPT, greedy(2))
    for request_id, prompt, fields, told in (
        ("taken", PROMPT, {}, "Request id taken already running"),
        (7, PROMPT, {}, "request_id must be a string"),
        ("new", [], {}, "empty"),
        ("new", [9999], {}, "out of vocabulary"),
        ("new", PROMPT, {"priority": 1}, "priority scheduling is not enabled"),
    ):
        with pytest.raises(ValidationError, match=told):
            engine.add_request(request_id, prompt, greedy(2), **fields)
    assert set(all_outputs(engine)) == {"taken"}


def test_an_engine_that_was_shut_down_says_so() -> None:
    engine = LLMEngine.from_engine_args(ARGUMENTS_OF_TESTS)
    engine.add_request("one", PROMPT, greedy(500))
    engine.shutdown()
    with pytest.raises(EngineStoppedError):
        all_outputs(engine)
    with pytest.raises(EngineStoppedError):
        engine.add_request("two", PROMPT, greedy(2))


def test_arguments_are_the_table_with_its_defaults() -> None:
    arguments = EngineArgs(BASE, max_loras=3)
    assert [field.name for field in dataclasses.fields(EngineArgs)] == [argument.name for argument in ARGUMENTS]
    assert dataclasses.asdict(arguments)["max_loras"] == 3
    assert (arguments.model, arguments.max_lora_rank, arguments.tensor_parallel_size) == (BASE, 16, 1)
    assert EngineArgs(BASE) == EngineArgs(model=BASE) != arguments
    assert isinstance(AsyncEngineArgs(BASE), EngineArgs)
    with pytest.raises(TypeError, match="max_lora_ranks"):
        EngineArgs(BASE, max_lora_ranks=3)
    with pytest.raises(ValidationError, match=r"EngineArgs\.create_engine_config\(\) is not supported"):
        arguments.create_engine_config()
    with pytest.raises(ValidationError, match="tensor_parallel_size=2 is not supported"):
        LLMEngine.from_engine_args(EngineArgs(BASE, tensor_parallel_size=2))


@pytest.mark.parametrize("make", [argparse.ArgumentParser, FlagParser])
def test_arguments_from_a_command_line(make: Callable[[], argparse.ArgumentParser]) -> None:
    parser = AsyncEngineArgs.add_cli_args(make())
    given = ["--model", BASE, "--enable-lora", "--max-lora-rank", "64", "-tp", "1", "--served-model-name", "a", "b"]
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(given))
    expected = AsyncEngineArgs(BASE, enable_lora=True, max_lora_rank=64, served_model_name=["a", "b"])
    assert arguments == expected


def test_arguments_of_async_engines_are_arguments(caplog: pytest.LogCaptureFixture) -> None:
    given = AsyncEngineArgs(**ARGUMENTS_OF_TESTS, enable_log_requests=True)
    engine = LLMEngine.from_engine_args(given)
    engine.shutdown()
    (warning,) = [record.getMessage() for record in caplog.records if "enable_log_requests" in record.getMessage()]
    assert "never logged" in warning


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "",
            ["LLM", "AsyncLLMEngine", "AsyncEngineArgs", "EngineArgs", "LLMEngine", "SamplingParams", "RequestOutput"],
        ),
        (".engine.arg_utils", ["EngineArgs", "AsyncEngineArgs"]),
        (".engine.llm_engine", ["LLMEngine"]),
        (".engine.async_llm_engine", ["AsyncLLMEngine"]),
        (".v1.engine.async_llm", ["AsyncLLM"]),
        (".v1.engine.llm_engine", ["LLMEngine"]),
        (".sampling_params", ["SamplingParams", "RequestOutputKind"]),
        (".lora.request", ["LoRARequest"]),
        (".outputs", ["RequestOutput", "CompletionOutput"]),
        (".inputs", ["TextPrompt", "TokensPrompt"]),
        (".entrypoints.llm", ["LLM"]),
        (".entrypoints.openai.api_server", ["main"]),
    ],
)
def test_modules_have_vllms_paths(path: str, names: list[str]) -> None:
    module = importlib.import_module("manylora" + path)
    for name in names:
        assert getattr(module, name) is getattr(manylora, name, getattr(module, name))
