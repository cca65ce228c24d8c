"""Adapters given as arrays in memory: the same adapter as from a folder, and nothing of the caller's kept."""

from __future__ import annotations

import copy
import enum
import gc
import json
import sys
import types
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeEngine, adapter_path, answer, greedy, lora
from dlpack_exporter import BFLOAT, Exporter
from manylora import LLM, AdapterError, LoRARequest, ValidationError
from manylora.exceptions import AdapterConflictError

PROMPT = [5, 40, 99, 7, 130]
CONVERSATION = [{"role": "user", "content": "How many orders were paid in Vienna?"}]


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(adapter_path(name)) / "adapter_config.json").read_text())
    return config


def arrays_of(name: str, old: bool = False) -> dict[str, Any]:
    """The tensors of an adapter: numpy's, or by hand where numpy has no such type."""
    content = (Path(adapter_path(name)) / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    data = content[8 + size :]
    arrays: dict[str, Any] = {}
    for key, entry in json.loads(content[8 : 8 + size]).items():
        if key == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if entry["dtype"] == "BF16":
            arrays[key] = Exporter(data[first:last], entry["shape"], code=BFLOAT, bits=16, old=old)
        else:
            kind = {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]
            arrays[key] = np.frombuffer(data[first:last], kind).reshape(entry["shape"])
    return arrays


def given(name: str, number: int, label: str | None = None, **fields: Any) -> LoRARequest:
    """A request with an adapter of the oracle in memory."""
    fields = {"lora_tensors": arrays_of(name), "peft_config": config_of(name)} | fields
    return LoRARequest(label or name, number, **fields)


def run(llm: LLM, request: LoRARequest | None, count: int = 12) -> list[tuple[Any, ...]]:
    (output,) = llm.generate(PROMPT, greedy(count, logprobs=1), use_tqdm=False, lora_request=request)
    return answer(output)


@pytest.mark.parametrize(
    "name", ["alpha", "bf16", "fp16", "mixed", "pattern", "rs16-embed-head", "embed-head", "all-linear", "regex"]
)
def test_the_same_content_from_memory_is_the_same_version(name: str, make_engine: MakeEngine) -> None:
    llm = make_engine()
    expected = run(llm, lora(name, 1))
    saved = llm.load_report(name)
    request = given(name, 2, f"{name}-given")
    assert run(llm, request) == expected
    report = llm.load_report(f"{name}-given")
    assert report["version"] == saved["version"]
    for key in ("modules", "matched", "ignored", "bytes"):
        assert report[key] == saved[key], key
    # Alone on an engine that never saw the folder.
    other = make_engine()
    assert run(other, given(name, 1)) == expected
    for array in arrays_of(name).values():
        assert isinstance(array, np.ndarray) == (name != "bf16") or name == "mixed"


def test_bfloat16_comes_through_either_kind_of_capsule(llm: LLM) -> None:
    llm.llm_engine.add_lora(lora("bf16", 1))
    expected = llm.load_report("bf16")["version"]
    for old in (False, True):
        arrays = arrays_of("bf16", old)
        llm.llm_engine.add_lora(LoRARequest("given", 2, lora_tensors=arrays, peft_config=config_of("bf16")))
        assert llm.load_report("given")["version"] == expected
        assert {len(array.given_back) for array in arrays.values()} == {1}
        assert llm.llm_engine.remove_lora(2)


def test_a_request_with_tensors_goes_wherever_a_request_goes(llm: LLM) -> None:
    request = given("alpha", 3)
    with_adapter, base = llm.generate([PROMPT, PROMPT], greedy(8), use_tqdm=False, lora_request=[request, None])
    assert with_adapter.lora_request is request
    assert with_adapter.outputs[0].token_ids != base.outputs[0].token_ids
    (chatted,) = llm.chat(CONVERSATION, greedy(8), use_tqdm=False, lora_request=request)
    (expected,) = llm.chat(CONVERSATION, greedy(8), use_tqdm=False, lora_request=lora("alpha", 4))
    assert answer(chatted) == answer(expected)
    llm.enqueue(PROMPT, greedy(8), lora_request=given("beta", 5))
    (queued,) = llm.wait_for_completion(use_tqdm=False)
    assert queued.outputs[0].token_ids == run(llm, lora("beta", 6), 8)[0][0]
    assert llm.llm_engine.add_lora(given("gamma", 7))
    assert llm.llm_engine.pin_lora(7)
    assert 7 in llm.llm_engine.list_loras()
    assert llm.llm_engine.remove_lora(7)
    assert 7 not in llm.llm_engine.list_loras()
    paths = {record.name: record.path for record in llm.llm_engine.core.list_adapters()}
    assert paths == {"alpha": None, "beta": None}


def test_the_callers_arrays_are_neither_changed_nor_kept(llm: LLM) -> None:
    arrays = {key: array.copy() for key, array in arrays_of("alpha").items()}
    before = {key: array.copy() for key, array in arrays.items()}
    config = config_of("alpha")
    kept_config = copy.deepcopy(config)
    counts = {key: sys.getrefcount(array) for key, array in arrays.items()}
    request = LoRARequest("given", 1, lora_tensors=arrays, peft_config=config)
    expected = run(llm, request)
    assert all(np.array_equal(arrays[key], before[key]) for key in before)
    assert config == kept_config
    gc.collect()
    assert {key: sys.getrefcount(array) for key, array in arrays.items()} == counts
    # What happens to them later is the caller's business, until a request asks for a replacement.
    for array in arrays.values():
        array *= 0.5
    assert run(llm, request) == expected
    changed = run(llm, replace(request, load_inplace=True))
    assert changed != expected
    watched = [weakref.ref(array) for array in arrays.values()]
    del request, arrays, array
    gc.collect()
    assert all(ref() is None for ref in watched)
    assert run(llm, LoRARequest("fresh", 2, adapter_path("alpha"))) == expected


def test_arrays_are_read_once_for_all_requests_with_them(llm: LLM) -> None:
    arrays = arrays_of("bf16")
    request = LoRARequest("given", 1, lora_tensors=arrays, peft_config=config_of("bf16"))
    for _ in range(3):
        llm.generate([PROMPT] * 4, greedy(2), use_tqdm=False, lora_request=request)
    assert {len(array.capsules) for array in arrays.values()} == {1}
    # Another request with them reads them, and finds what is there already.
    for _ in range(2):
        run(llm, replace(request, scale=0.5))
    assert {len(array.capsules) for array in arrays.values()} == {3}
    assert llm.llm_engine.list_loras() == {1}


def test_names_and_ids_are_bound_to_content_from_wherever(llm: LLM) -> None:
    assert llm.llm_engine.add_lora(given("alpha", 1, "x"))
    assert llm.llm_engine.add_lora(given("alpha", 1, "x"))
    assert llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("alpha")))
    first = run(llm, given("alpha", 1, "x"))
    with pytest.raises(AdapterConflictError, match=r"`x` of tensors in memory .*other content"):
        llm.llm_engine.add_lora(given("beta", 1, "x"))
    with pytest.raises(AdapterConflictError, match="other content"):
        llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("beta")))
    assert run(llm, given("alpha", 1, "x")) == first
    # A replacement that fails leaves the old version.
    broken = arrays_of("beta")
    key = sorted(broken)[0]
    broken[key] = np.full_like(broken[key], np.nan)
    with pytest.raises(AdapterError, match=r"nan|NaN") as refusal:
        llm.llm_engine.add_lora(given("beta", 1, "x", lora_tensors=broken, load_inplace=True))
    assert refusal.value.keys == [key]
    assert run(llm, given("alpha", 1, "x")) == first
    assert llm.llm_engine.add_lora(given("beta", 1, "x", load_inplace=True))
    assert run(llm, given("beta", 1, "x")) == run(llm, lora("beta", 2))
    assert llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("alpha"), load_inplace=True))
    assert run(llm, LoRARequest("x", 1, adapter_path("alpha"))) == first


class Task(str, enum.Enum):
    CAUSAL = "CAUSAL_LM"


class Kind(enum.Enum):
    LORA = "LORA"


class Config:
    """What PEFT's `LoraConfig` gives: sets and members of enumerations among plain values."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        modules = set(self.values["target_modules"])
        pattern = types.MappingProxyType({"q_proj": 4})
        return self.values | {
            "target_modules": modules, "task_type": Task.CAUSAL, "peft_type": Kind.LORA, "rank_pattern": pattern,
        }  # fmt: skip


def test_the_configuration_may_be_pefts_object(llm: LLM) -> None:
    llm.llm_engine.add_lora(lora("alpha", 1))
    for number, config in enumerate((Config(config_of("alpha")), types.MappingProxyType(config_of("alpha"))), start=2):
        llm.llm_engine.add_lora(given("alpha", number, f"given-{number}", peft_config=config))
        assert llm.load_report(f"given-{number}")["version"] == llm.load_report("alpha")["version"]


def test_a_refused_adapter_in_memory_names_its_keys(make_engine: MakeEngine) -> None:
    llm = make_engine(max_lora_rank=16)
    alpha = arrays_of("alpha")
    key = sorted(alpha)[0]
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"peft_config": config_of("alpha") | {"use_dora": True}}, "use_dora", "DoRA|dora"),
        ({"lora_tensors": alpha | {"base_model.model.model.layers.9.x": alpha[key]}}, "layers.9", "layers.9"),
        ({"lora_tensors": {name: array for name, array in alpha.items() if name != key}}, "down_proj", "down_proj"),
        ({"lora_tensors": alpha | {key: alpha[key][:, :-1]}}, key, "shape"),
        ({"lora_tensors": alpha | {key: alpha[key].astype("f8")}}, key, "float64"),
        ({"lora_tensors": alpha | {key: alpha[key].astype("i4")}}, key, "int32"),
    ]
    for fields, named, reason in cases:
        with pytest.raises(AdapterError, match=reason) as refusal:
            llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=given("alpha", 1, **fields))
        assert refusal.value.adapter == "alpha"
        assert any(named in offending for offending in refusal.value.keys), (named, refusal.value.keys)
    with pytest.raises(AdapterError, match=r"(?s)24.*16"):
        llm.llm_engine.add_lora(given("rank24", 1))
    assert llm.llm_engine.list_loras() == set()
    assert llm.llm_engine.stats()["adapter_bytes"] == 0
    with pytest.raises(ValidationError, match="but LoRA is not enabled!"):
        make_engine(enable_lora=False).generate([5], use_tqdm=False, lora_request=given("alpha", 1))


def test_a_50_adapters_from_memory_leave_nothing_behind(llm: LLM) -> None:
    source, config = arrays_of("rank64"), config_of("rank64")
    start = llm.llm_engine.stats()
    resident = []
    for number in range(200):
        arrays = {key: array + np.float32(number) for key, array in source.items()}
        assert llm.llm_engine.add_lora(LoRARequest("given", 1, lora_tensors=arrays, peft_config=config))
        assert llm.llm_engine.stats()["adapter_bytes"] > 0
        assert llm.llm_engine.remove_lora(1)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    end = llm.llm_engine.stats()
    for level in ("adapter_bytes", "loading_bytes", "free_blocks", "adapters"):
        assert end[level] == start[level], level
    assert resident[-1] < resident[60] + 4 * 1024 * 1024
