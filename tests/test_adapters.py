"""Loading, replacing, evicting and unloading adapters through `LLM` and `llm_engine`."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from conftest import ORACLE, MakeEngine, adapter_path, answer, greedy, logits_of, lora
from manylora import LLM, AdapterError, LoRARequest, ManyLoRAError, ValidationError
from manylora.exceptions import AdapterConflictError, AdapterNotFoundError

PROMPT = [5, 40, 99, 7, 130]
MakeAdapter = Callable[..., str]


def tokens(llm: LLM, request: LoRARequest | None) -> list[int]:
    return llm.generate(PROMPT, greedy(12), use_tqdm=False, lora_request=request)[0].outputs[0].token_ids


def test_adapters_are_added_listed_pinned_and_removed(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.list_loras() == set()
    assert engine.add_lora(lora("alpha", 7))
    assert engine.add_lora(lora("beta", 9))
    assert engine.list_loras() == {7, 9}
    assert engine.pin_lora(7)
    assert engine.remove_lora(7)
    assert not engine.remove_lora(7)
    assert engine.list_loras() == {9}
    with pytest.raises(ValidationError, match="no adapter has the id 7"):
        engine.pin_lora(7)
    # A request brings its adapter with it.
    assert tokens(llm, lora("alpha", 7)) != tokens(llm, None)
    assert engine.list_loras() == {7, 9}


def test_the_load_report_says_what_is_applied(llm: LLM) -> None:
    llm.llm_engine.add_lora(lora("pattern", 1))
    report = llm.load_report("pattern")
    assert report["adapter"] == "pattern"
    assert len(report["version"]) == 64
    assert report["refused"] == {}
    assert report["ignored"] == {}
    modules = report["modules"]
    assert modules["model.layers.0.self_attn.q_proj"]["scale"] == 2.0
    assert modules["model.layers.1.self_attn.q_proj"]["scale"] == 1.0
    assert modules["model.layers.1.self_attn.q_proj"]["rank"] == 8
    assert modules["model.layers.0.self_attn.v_proj"]["scale"] == 8.0
    assert all(module["effect"] > 0 for module in modules.values())
    assert len(report["matched"]) == 2 * len(modules)
    elements = sum(array.size for array in _tensors("pattern").values())
    assert report["bytes"] == 4 * elements
    with pytest.raises(ValidationError, match="`other` is not loaded; loaded: pattern"):
        llm.load_report("other")


def _tensors(name: str) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(Path(adapter_path(name)) / "adapter_model.safetensors")


def test_the_effect_is_the_norm_of_scale_times_b_times_a(llm: LLM) -> None:
    llm.llm_engine.add_lora(lora("alpha", 1))
    content = _tensors("alpha")
    module = "model.layers.1.mlp.up_proj"
    a, b = (content[f"base_model.model.{module}.lora_{side}.weight"].astype("f8") for side in "AB")
    reported = llm.load_report("alpha")["modules"][module]
    assert reported["effect"] == pytest.approx(reported["scale"] * np.linalg.norm(b @ a), rel=1e-5)


def test_a_05_copies_of_the_base_are_ignored_with_a_reason(llm: LLM) -> None:
    llm.llm_engine.add_lora(lora("embed-head", 1))
    ignored = llm.load_report("embed-head")["ignored"]
    assert len(ignored) == 2
    assert all("base_layer" in key and reason for key, reason in ignored.items())


def test_a_refused_adapter_raises_all_there_is_to_know(llm: LLM) -> None:
    with pytest.raises(AdapterError) as refusal:
        llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=lora("dora", 1))
    error = refusal.value
    assert isinstance(error, ManyLoRAError)
    assert not isinstance(error, ValueError)
    assert error.adapter == "dora"
    assert "use_dora" in error.keys
    assert "use_dora" in error.report["refused"]
    assert error.kind == "invalid"
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.adapter, copied.keys) == (str(error), error.adapter, error.keys)
    assert llm.llm_engine.list_loras() == set()
    assert tokens(llm, None) == tokens(llm, None)


def test_a_18_limits_come_from_the_configuration_alone(make_engine: MakeEngine) -> None:
    llm = make_engine(max_lora_rank=16)
    for number, name in enumerate(("rank1", "sub-q", "sub-gate", "rank12", "embed-head"), start=1):
        assert llm.llm_engine.add_lora(lora(name, number))
    with pytest.raises(AdapterError, match=r"(?s)24.*16"):
        llm.llm_engine.add_lora(lora("rank24", 24))


@pytest.mark.parametrize("limit", [4, 12])
def test_a_20_any_positive_rank_limit_is_a_limit(limit: int, make_engine: MakeEngine) -> None:
    llm = make_engine(max_lora_rank=limit)
    for number, rank in enumerate((1, 2, 3, 5, 12, 24), start=1):
        if rank <= limit:
            llm.llm_engine.add_lora(lora(f"rank{rank}", number))
        else:
            with pytest.raises(AdapterError) as refusal:
                llm.llm_engine.add_lora(lora(f"rank{rank}", number))
            assert str(rank) in str(refusal.value)
            assert str(limit) in str(refusal.value)


def test_lora_target_modules_restricts_what_adapters_touch(make_engine: MakeEngine) -> None:
    llm = make_engine(lora_target_modules=["q_proj", "v_proj"])
    assert llm.llm_engine.add_lora(lora("qv", 1))
    with pytest.raises(AdapterError, match=r"lora_target_modules|target") as refusal:
        llm.llm_engine.add_lora(lora("sub-ko", 2))
    assert any("k_proj" in key for key in refusal.value.keys)


@pytest.mark.parametrize(
    ("target", "error", "reason"),
    [
        ("/nowhere/at/all", AdapterNotFoundError, "no such folder"),
        ("./not-here", AdapterNotFoundError, "no such folder"),
        (str(ORACLE / "llama" / "manifest.json"), AdapterError, "is a file"),
        (str(ORACLE / "llama" / "base"), AdapterError, "adapter_config.json"),
        (str(ORACLE / "qwen3" / "adapters" / "alpha"), AdapterError, "shape"),
    ],
)
def test_a_22_wrong_paths_are_answered_at_load(target: str, error: type[Exception], reason: str, llm: LLM) -> None:
    with pytest.raises(error, match=reason) as refusal:
        llm.llm_engine.add_lora(LoRARequest("wrong", 1, target))
    assert refusal.value.adapter == "wrong"
    assert llm.llm_engine.list_loras() == set()
    # The name and the id are free for the right one.
    assert llm.llm_engine.add_lora(LoRARequest("wrong", 1, adapter_path("alpha")))


def test_a_25_loading_again_is_a_no_op_and_other_content_needs_replacement(llm: LLM, make_adapter: MakeAdapter) -> None:
    assert llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("alpha")))
    assert llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("alpha")))
    # The same content from another place is the same adapter.
    assert llm.llm_engine.add_lora(LoRARequest("x", 1, make_adapter("copy", "alpha")))
    first = tokens(llm, LoRARequest("x", 1, adapter_path("alpha")))
    with pytest.raises(AdapterConflictError, match="other content"):
        llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("beta")))
    assert tokens(llm, LoRARequest("x", 1, adapter_path("alpha"))) == first
    assert llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("beta"), load_inplace=True))
    assert tokens(llm, LoRARequest("x", 1, adapter_path("beta"))) == tokens(llm, lora("beta", 2))


def test_a_27_a_failed_replacement_leaves_the_old_version(llm: LLM) -> None:
    before = tokens(llm, LoRARequest("x", 1, adapter_path("alpha")))
    with pytest.raises(AdapterError):
        llm.llm_engine.add_lora(LoRARequest("x", 1, str(ORACLE / "malformed" / "nan"), load_inplace=True))
    assert llm.llm_engine.list_loras() == {1}
    assert tokens(llm, LoRARequest("x", 1, adapter_path("alpha"))) == before


def test_a_24_concurrent_loads_of_one_name_agree(llm: LLM) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda _: llm.llm_engine.add_lora(lora("alpha", 1)), range(100)))
    assert llm.llm_engine.list_loras() == {1}
    stats = llm.llm_engine.stats()
    assert len(stats["adapters"]) == 1

    def load_and_unload(number: int) -> bool:
        return (
            llm.llm_engine.add_lora(lora("beta", 2)) if number % 2 else llm.llm_engine.remove_lora(2) in (True, False)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(load_and_unload, range(100)))
    assert llm.llm_engine.list_loras() in ({1}, {1, 2})
    assert tokens(llm, lora("alpha", 1)) != tokens(llm, None)


def test_a_26_a_replacement_reads_the_adapter_once(llm: LLM, make_adapter: MakeAdapter) -> None:
    expected = llm.generate(PROMPT, greedy(200), use_tqdm=False, lora_request=lora("beta", 2))[0].outputs[0].token_ids
    llm.llm_engine.add_lora(LoRARequest("x", 1, adapter_path("alpha")))
    path = make_adapter("read-once", "beta")
    ids = llm.enqueue(PROMPT, greedy(200), lora_request=LoRARequest("x", 1, path, load_inplace=True))
    # Whoever read it again in the 200 steps that follow would fail.
    shutil.rmtree(path)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id] == ids
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("name", ["org/ad@v2", "base:ad", "a=b", "..", "x" * 300, "Ünïcödé ☃", "oracle/llama"])
def test_a_46_any_printable_name_is_a_name(name: str, llm: LLM) -> None:
    request = LoRARequest(name, 1, adapter_path("alpha"))
    (output,) = llm.generate(PROMPT, greedy(12), use_tqdm=False, lora_request=request)
    assert output.outputs[0].token_ids == tokens(llm, lora("alpha", 2))
    assert output.lora_request.lora_name == name
    assert llm.load_report(name)["adapter"] == name


def test_a_46_names_with_control_characters_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="control characters"):
        llm.llm_engine.add_lora(LoRARequest("a\nb", 1, adapter_path("alpha")))


def test_a_47_the_base_decides_template_and_end_tokens(llm: LLM, make_adapter: MakeAdapter) -> None:
    path = Path(make_adapter("own-tokenizer", "alpha"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ORACLE / "llama" / "base" / file, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ 'other' }}"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 288)), "temperature": 2.0}))
    conversation = [{"role": "user", "content": "How many?"}]
    own = llm.chat(conversation, greedy(8), use_tqdm=False, lora_request=LoRARequest("own", 1, str(path)))[0]
    plain = llm.chat(conversation, greedy(8), use_tqdm=False, lora_request=lora("alpha", 2))[0]
    assert own.prompt == plain.prompt
    assert answer(own) == answer(plain)
    assert llm.load_report("own")["version"] == llm.load_report("alpha")["version"]


def test_an_id_leads_to_the_name_it_was_given_last(llm: LLM) -> None:
    first, second = (LoRARequest(name, 1, adapter_path("alpha")) for name in ("x", "y"))
    for request in (first, second):
        assert llm.llm_engine.add_lora(request)
    assert llm.llm_engine.list_loras() == {1}
    assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.list_loras() == set()
    # The other name is still there, and has the id again when a request brings it.
    assert tokens(llm, first) == tokens(llm, second)
    for request in (first, second):
        llm.llm_engine.add_lora(request)
        assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.list_loras() == set()
    assert llm.llm_engine.stats()["adapter_bytes"] == 0


def test_a_29_a_used_slot_keeps_nothing_of_the_evicted_adapter(
    make_engine: MakeEngine, oracle: Callable, make_adapter: MakeAdapter
) -> None:
    llm = make_engine(max_loras=1, max_cpu_loras=1)
    alone = make_engine(enable_lora=False)
    ids = oracle("llama").m["prompts"]["mid"]["ids"]
    base = logits_of(alone, ids)
    requests = {name: lora(name, number) for number, name in enumerate(("rank64", "layers-0", "null"), start=1)}
    for request in requests.values():
        llm.llm_engine.add_lora(request)

    def check(name: str) -> None:
        logits = logits_of(llm, ids, name)
        if name == "null":
            assert np.array_equal(logits, base)
        else:
            oracle("llama").compare_logits(name, "mid", logits)

    for name in ("rank64", "layers-0", "null"):
        check(name)
    source = random.Random(29)
    for _ in range(200):
        check(source.choice(list(requests)))
    assert llm.llm_engine.stats()["evictions"] > 100


def test_a_30_more_adapters_than_slots_all_answer(make_engine: MakeEngine) -> None:
    requests = [lora(f"fleet-0{number}", number + 1) for number in range(6)]
    roomy, tight = make_engine(), make_engine(max_loras=1, max_cpu_loras=2)
    expected = [tokens(roomy, request) for request in requests]
    assert len({tuple(answer) for answer in expected}) > 3
    for _ in range(5):
        assert [tokens(tight, request) for request in requests] == expected
    together = tight.generate([PROMPT] * 6, greedy(12), use_tqdm=False, lora_request=requests)
    assert [output.outputs[0].token_ids for output in together] == expected
    stats = tight.llm_engine.stats()
    assert len(stats["adapters"]) <= 2
    assert stats["loads"] > 6


def test_a_30_fewer_resident_adapters_than_slots_is_refused_at_start(make_engine: MakeEngine) -> None:
    with pytest.raises(ValidationError, match=r"max_cpu_loras.*1.*max_loras.*2"):
        make_engine(max_loras=2, max_cpu_loras=1)


def test_a_23_a_folder_deleted_after_eviction_fails_only_its_own_requests(
    make_engine: MakeEngine, make_adapter: MakeAdapter
) -> None:
    llm = make_engine(max_loras=1, max_cpu_loras=1)
    gone = LoRARequest("gone", 1, make_adapter("gone", "beta"))
    good = lora("alpha", 2)
    expected = tokens(llm, gone), tokens(llm, good)
    shutil.rmtree(gone.lora_path)
    with pytest.raises(ManyLoRAError, match="gone"):
        tokens(llm, gone)
    assert tokens(llm, good) == expected[1]


def test_a_40_content_that_changed_on_disk_is_not_served_under_the_old_version(
    make_engine: MakeEngine, make_adapter: MakeAdapter
) -> None:
    llm = make_engine(max_loras=1, max_cpu_loras=1)
    changing = LoRARequest("changing", 1, make_adapter("changing", "beta"))
    tokens(llm, changing)
    tokens(llm, lora("alpha", 2))
    shutil.copy(Path(adapter_path("gamma")) / "adapter_model.safetensors", changing.lora_path)
    shutil.copy(Path(adapter_path("gamma")) / "adapter_config.json", changing.lora_path)
    with pytest.raises(ManyLoRAError, match="changed on disk"):
        tokens(llm, changing)


def test_a_34_pins_are_kept_and_never_take_every_slot(make_engine: MakeEngine) -> None:
    llm = make_engine(max_loras=2, max_cpu_loras=2)
    requests = [lora(name, number) for number, name in enumerate(("alpha", "beta", "gamma"), start=1)]
    for request in requests[:2]:
        llm.llm_engine.add_lora(request)
    assert llm.llm_engine.pin_lora(1)
    with pytest.raises(AdapterError, match="2"):
        llm.llm_engine.pin_lora(2)
    expected = [tokens(llm, request) for request in requests]
    loads = llm.llm_engine.stats()["loads"]
    for _ in range(3):
        assert tokens(llm, requests[0]) == expected[0]
        assert tokens(llm, requests[2]) == expected[2]
        assert tokens(llm, requests[1]) == expected[1]
    # Alpha was never read again; the two others took turns.
    pinned = [adapter for adapter in llm.llm_engine.stats()["adapters"] if adapter["pinned"]]
    assert len(pinned) == 1
    assert llm.llm_engine.stats()["loads"] - loads >= 4


def test_a_41_one_name_or_id_never_serves_other_content(llm: LLM) -> None:
    prompt = [3 + 5 * i % 280 for i in range(64)]

    def run(request: LoRARequest) -> tuple:
        (output,) = llm.generate(prompt, greedy(8, logprobs=0), use_tqdm=False, lora_request=request)
        return answer(output), output.num_cached_tokens

    first, _ = run(LoRARequest("x", 1, adapter_path("alpha")))
    for again in (LoRARequest("x", 2, adapter_path("beta")), LoRARequest("y", 1, adapter_path("beta"))):
        with pytest.raises(AdapterConflictError):
            run(again)
    replaced, cached = run(LoRARequest("x", 1, adapter_path("beta"), load_inplace=True))
    assert cached == 0
    assert replaced != first
    # A second name for the same content shares the version and its blocks.
    other, cached = run(LoRARequest("other", 5, adapter_path("beta")))
    assert other == replaced
    assert cached == 48
    assert llm.load_report("x")["version"] == llm.load_report("other")["version"]


def test_a_42_versions_do_not_depend_on_the_order_of_loading(make_engine: MakeEngine) -> None:
    versions = []
    for order in itertools.permutations(("alpha", "beta")):
        llm = make_engine()
        for number, name in enumerate(order, start=1):
            llm.llm_engine.add_lora(lora(name, number))
        versions.append({name: llm.load_report(name)["version"] for name in order})
    assert versions[0] == versions[1]


def test_a_50_loading_and_unloading_leaves_nothing_behind(llm: LLM, make_adapter: MakeAdapter) -> None:
    paths = [make_adapter(f"many-{number}", seed=number) for number in range(300)]
    start = llm.llm_engine.stats()
    resident = []
    for number, path in enumerate(paths, start=1):
        llm.llm_engine.add_lora(LoRARequest(f"many-{number}", number, path))
        if number % 50 == 0:
            tokens(llm, LoRARequest(f"many-{number}", number, path))
        assert llm.llm_engine.stats()["adapter_bytes"] > 0
        assert llm.llm_engine.remove_lora(number)
        resident.append(_resident_bytes())
    end = llm.llm_engine.stats()
    assert llm.llm_engine.list_loras() == set()
    for level in ("adapter_bytes", "loading_bytes", "total_blocks", "free_blocks", "adapters", "running", "waiting"):
        assert end[level] == start[level], level
    assert resident[-1] < resident[100] + 4 * 1024 * 1024


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_strict_base_refuses_an_adapter_of_another_base(
    make_engine: MakeEngine, make_adapter: MakeAdapter, caplog
) -> None:
    other = make_adapter("other", config={"base_model_name_or_path": "someone/other-model-7b"})
    lenient = make_engine()
    assert lenient.llm_engine.add_lora(LoRARequest("other", 1, other))
    (warning,) = [record.getMessage() for record in caplog.records if "other-model-7b" in record.getMessage()]
    assert "`other`" in warning
    with pytest.raises(AdapterError, match="other-model-7b"):
        make_engine(strict_base=True).llm_engine.add_lora(LoRARequest("other", 1, other))
    # Served names are names of the base too.
    named = make_engine(strict_base=True, served_model_name="Other-Model-7B")
    assert named.llm_engine.add_lora(LoRARequest("other", 1, other))


def test_a_02_an_unknown_key_is_one_warning(llm: LLM, caplog) -> None:
    llm.llm_engine.add_lora(lora("config-unknown", 1))
    unknown = [record.getMessage() for record in caplog.records if "future" in record.getMessage()]
    assert unknown, [record.getMessage() for record in caplog.records]
    assert json.dumps(llm.load_report("config-unknown")["warnings"]).count("future") >= 1


def test_lora_root_confines_adapters(make_engine: MakeEngine) -> None:
    llm = make_engine(lora_root=[ORACLE / "llama" / "adapters", ORACLE / "qwen3" / "adapters"])
    assert llm.llm_engine.add_lora(lora("alpha", 1))
    for outside in (ORACLE / "malformed" / "has-tokenizer-copy", ORACLE / "llama" / "adapters" / ".." / "base", "/etc"):
        with pytest.raises(AdapterError, match="outside the folders") as refusal:
            llm.llm_engine.add_lora(LoRARequest("outside", 2, str(outside)))
        assert refusal.value.kind == "forbidden"


LONG_PROMPT = [3 + 5 * i % 280 for i in range(64)]


def with_scale(llm: LLM, request: LoRARequest | None, **fields: object) -> tuple[list, int]:
    (output,) = llm.generate(LONG_PROMPT, greedy(8, logprobs=2, **fields), use_tqdm=False, lora_request=request)
    return answer(output), output.num_cached_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_53_strength_zero_is_exactly_the_base(dtype: str, make_engine: MakeEngine) -> None:
    llm = make_engine(dtype=dtype)
    base, cached = with_scale(llm, None)
    assert cached == 0
    # It even reads what the base computed.
    for scale in (0, 0.0, -0.0):
        assert with_scale(llm, lora("alpha", 1, scale=scale)) == (base, 48)
    assert with_scale(llm, lora("alpha", 1))[0] != base
    logits = logits_of(llm, LONG_PROMPT)
    assert np.array_equal(logits, logits_of(llm, LONG_PROMPT, "alpha", 0.0))
    assert np.array_equal(logits, np.from_dlpack(llm.llm_engine.core.logits(LONG_PROMPT, [])))
    assert not np.array_equal(logits, logits_of(llm, LONG_PROMPT, "alpha", 1.0))
    # Strength does not let an adapter pass that would be refused.
    with pytest.raises(AdapterError, match="use_dora"):
        with_scale(llm, lora("dora", 2, scale=0))


@pytest.mark.parametrize("name", ["alpha", "pattern", "embed-head"])
@pytest.mark.parametrize("scale", [0.5, 2.0, -1.0, 0.3])
def test_a_53_a_strength_is_a_factor_of_b(name: str, scale: float, llm: LLM, make_adapter: MakeAdapter) -> None:
    def scaled(content: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        factor = np.float32(scale)
        return {
            key: value * factor if ".lora_B" in key or "lora_embedding_B" in key else value
            for key, value in content.items()
        }

    llm.llm_engine.add_lora(lora(name, 1))
    llm.llm_engine.add_lora(LoRARequest("made", 2, make_adapter("made", name, tensors=scaled)))
    strong, made = logits_of(llm, LONG_PROMPT, name, scale), logits_of(llm, LONG_PROMPT, "made")
    if scale in (0.5, 2.0, -1.0):
        # Factors that are exact in binary.
        assert np.array_equal(strong, made)
    assert np.abs(strong - made).max() < 1e-4
    assert np.abs(strong - logits_of(llm, LONG_PROMPT, name)).max() > 0.01


def test_a_53_strengths_run_side_by_side_as_they_do_alone(make_engine: MakeEngine) -> None:
    llm = make_engine(enable_prefix_caching=False, max_num_batched_tokens=96)
    requests: list[LoRARequest | None] = [None, lora("alpha", 1)]
    requests += [lora("alpha", 1, scale=scale) for scale in (0, 0.25, 0.5, 1, -1, 2, 0.5)]
    requests += [lora("beta", 2, scale=scale) for scale in (0.5, 1.5)]
    alone = [with_scale(llm, request)[0] for request in requests]
    together = llm.generate([LONG_PROMPT] * len(requests), greedy(8, logprobs=2), use_tqdm=False, lora_request=requests)
    assert [answer(output) for output in together] == alone
    assert [output.lora_request for output in together] == requests
    # Zero is the base, one is the default, and all others differ from each other.
    assert alone[0] == alone[2]
    assert alone[1] == alone[5]
    assert alone[4] == alone[8]
    assert len({repr(each) for each in alone}) == len(requests) - 3
    # Strength belongs to a request: the adapter is there once, whatever ran last.
    assert llm.llm_engine.list_loras() == {1, 2}
    assert len(llm.llm_engine.stats()["adapters"]) == 2
    assert with_scale(llm, lora("alpha", 1))[0] == alone[1]


def test_a_53_strengths_share_no_prefix(make_engine: MakeEngine) -> None:
    alone, llm = make_engine(enable_prefix_caching=False), make_engine()
    scales = (1.0, 0.5, 0.25, 0.0, -1.0, 0.5000001)
    expected = {scale: with_scale(alone, lora("alpha", 1, scale=scale))[0] for scale in scales}
    for scale in scales:
        assert with_scale(llm, lora("alpha", 1, scale=scale)) == (expected[scale], 0), scale
    for scale in reversed(scales):
        assert with_scale(llm, lora("alpha", 1, scale=scale)) == (expected[scale], 48), scale
    # The same content under another name, with the same strength: the same blocks.
    other = LoRARequest("other", 2, adapter_path("alpha"), scale=0.5)
    assert with_scale(llm, other) == (expected[0.5], 48)
