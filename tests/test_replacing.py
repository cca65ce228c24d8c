"""Adapters replaced under traffic, and many threads that load, use and unload the same ones at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from conftest import (
    MIB,
    ORACLE,
    PROMPT,
    MakeEngine,
    adapter_path,
    answer,
    greedy,
    logits_of,
    lora,
    named,
    resident_bytes,
    solo,
)
from manylora import LLM, AdapterError, LoRARequest, ValidationError
from manylora.exceptions import UnknownAdapterError
from test_memory_adapters import arrays_of, config_of, given

MALFORMED = ORACLE / "malformed"


def version(llm: LLM, name: str) -> str | None:
    record = llm.llm_engine.core.adapter(name)
    assert record is not None
    return record.version


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Do something in as many threads, all of which begin together."""
    barrier = Barrier(count)

    def one(number: int) -> Any:
        barrier.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(120) for future in [pool.submit(one, number) for number in range(count)]]


def test_a_24_a_hundred_loads_are_one_adapter(llm: LLM, expected: Callable) -> None:
    assert all(at_once(100, lambda _: llm.llm_engine.add_lora(lora("alpha", 1))))
    stats = llm.llm_engine.stats()
    assert (stats["adapter_reads"], stats["loads"], len(stats["adapters"])) == (1, 1, 1)
    assert llm.llm_engine.list_loras() == {1}
    assert solo(llm, lora("alpha", 1)) == expected("alpha")


def test_a_24_a_hundred_first_requests_are_one_read(make_engine: MakeEngine, expected: Callable) -> None:
    llm = make_engine(max_num_seqs=100)
    assert llm.llm_engine.register_loras([lora("alpha", 1)]) == {}
    answers = at_once(100, lambda _: solo(llm, lora("alpha", 1)))
    assert answers == [expected("alpha")] * 100
    stats = llm.llm_engine.stats()
    assert (stats["adapter_reads"], stats["loads"], len(stats["adapters"])) == (1, 1, 1)
    assert llm.llm_engine.list_loras() == {1}


def test_a_24_names_and_places_that_look_alike_stay_apart(llm: LLM, tmp_path: Path, expected: Callable) -> None:
    adapters = {}
    for place, source in (("a/b", "alpha"), ("a_b", "beta"), ("a-b", "gamma"), ("a%2Fb", "qv"), ("A_B", "rank5")):
        shutil.copytree(adapter_path(source), tmp_path / place)
        adapters[place] = (source, LoRARequest(place, 1 + len(adapters), str(tmp_path / place)))
    orders = [*adapters.values()] * 6
    at_once(len(orders), lambda number: llm.llm_engine.add_lora(orders[number][1]))
    assert len(llm.llm_engine.stats()["adapters"]) == len(adapters)
    for source, request in adapters.values():
        assert solo(llm, request) == expected(source)


def test_a_24_loads_mixed_with_unloads_and_failures(llm: LLM, expected: Callable) -> None:
    sources = ("alpha", "beta")

    def work(number: int) -> None:
        name, kind = number % 2, number // 2 % 4
        if kind == 0:
            llm.llm_engine.add_lora(named(f"x{name}", 1 + name, sources[name]))
        elif kind == 1:
            llm.llm_engine.register_loras([named(f"x{name}", 1 + name, sources[name])])
        elif kind == 2:
            with pytest.raises(AdapterError):
                llm.llm_engine.add_lora(LoRARequest(f"x{name}", 1 + name, str(MALFORMED / "inf")))
        else:
            llm.llm_engine.remove_lora(1 + name)

    at_once(96, work)
    assert llm.llm_engine.list_loras() <= {1, 2}
    for number, source in enumerate(sources):
        assert solo(llm, named(f"x{number}", 1 + number, source)) == expected(source)
        assert llm.llm_engine.remove_lora(1 + number)
    stats = llm.llm_engine.stats()
    assert (stats["adapter_bytes"], stats["loading_bytes"], stats["adapters"]) == (0, 0, [])
    assert llm.llm_engine.core.list_adapters() == []


def test_a_25_earlier_requests_finish_on_the_old_version(llm: LLM) -> None:
    params = greedy(300)

    def whole(name: str) -> list[int]:
        request = lora(name, 90 + len(name))
        return llm.generate(PROMPT, params, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids

    alpha, beta = whole("alpha"), whole("beta")
    llm.enqueue([PROMPT] * 3, params, lora_request=named("x", 1, "alpha"))
    first = version(llm, "x")
    second = llm.llm_engine.replace_lora(named("x", 1, "beta"))
    later = llm.generate(PROMPT, params, use_tqdm=False, lora_request=named("x", 1, "beta"))
    assert later[0].outputs[0].token_ids == beta
    earlier = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids for output in earlier] == [alpha] * 3
    assert alpha != beta
    assert second == version(llm, "x") != first
    assert llm.llm_engine.list_loras() == {1, 94, 95}


def test_a_25_a_replacement_compares_versions(llm: LLM, expected: Callable) -> None:
    engine = llm.llm_engine
    alpha = engine.replace_lora(named("x", 1, "alpha"))
    assert alpha == version(llm, "x")
    with pytest.raises(AdapterError, match=alpha) as refusal:
        engine.replace_lora(named("x", 1, "beta"), "0" * 64)
    assert refusal.value.adapter == "x"
    assert solo(llm, named("x", 1, "alpha")) == expected("alpha")
    beta = engine.replace_lora(named("x", 1, "beta"), alpha)
    assert solo(llm, named("x", 1, "beta")) == expected("beta")
    # The same once more is a no-op, and from memory it is the same content.
    assert engine.replace_lora(named("x", 1, "beta"), beta) == beta
    assert engine.replace_lora(given("beta", 1, "x"), beta) == beta
    with pytest.raises(AdapterError, match=beta):
        engine.replace_lora(given("gamma", 1, "x"), alpha)
    with pytest.raises(UnknownAdapterError, match="`y` is not loaded; loaded: x"):
        engine.replace_lora(named("y", 2, "beta"), beta)
    for wrong in ("", "abc", "g" * 64):
        with pytest.raises(ValidationError):
            engine.replace_lora(named("x", 1, "alpha"), wrong)
    assert (engine.list_loras(), version(llm, "x"), len(engine.stats()["adapters"])) == ({1}, beta, 1)


def test_a_26_200_steps_after_a_replacement_read_once(llm: LLM) -> None:
    llm.llm_engine.add_lora(named("x", 1, "alpha"))
    before = llm.llm_engine.stats()
    request = LoRARequest("x", 1, adapter_path("beta"), load_inplace=True)
    llm.generate([PROMPT, PROMPT[::-1]], greedy(200), use_tqdm=False, lora_request=request)
    after = llm.llm_engine.stats()
    assert after["steps"] - before["steps"] >= 200
    assert after["adapter_reads"] - before["adapter_reads"] == 1


def test_a_27_no_replacement_leaves_a_gap(llm: LLM) -> None:
    for name in ("alpha", "beta"):
        llm.llm_engine.add_lora(lora(name, len(name)))
    right = {name: logits_of(llm, PROMPT, name) for name in ("alpha", "beta")}
    llm.llm_engine.add_lora(named("x", 1, "alpha"))
    llm.enqueue(PROMPT, greedy(400), lora_request=named("x", 1, "alpha"))

    def serve(_: int) -> int:
        seen = 0
        for _ in range(60):
            # By its name alone: there is always one, and it is one of the two.
            logits = logits_of(llm, PROMPT, "x")
            seen += 1
            assert any(np.array_equal(logits, each) for each in right.values())
        return seen

    with ThreadPoolExecutor(4) as pool:
        callers: list[Future[int]] = [pool.submit(serve, number) for number in range(4)]
        for name in ["alpha", "beta"] * 8:
            for broken in ("nan", "truncated", "empty-folder"):
                with pytest.raises(AdapterError):
                    llm.llm_engine.replace_lora(LoRARequest("x", 1, str(MALFORMED / broken)))
            digest = llm.llm_engine.replace_lora(named("x", 1, name))
            assert digest == version(llm, "x") == version(llm, name)
            assert np.array_equal(logits_of(llm, PROMPT, "x"), right[name])
        assert [caller.result(120) for caller in callers] == [60] * 4
    alone = llm.generate(PROMPT, greedy(400), use_tqdm=False, lora_request=lora("alpha", 5))[0]
    assert answer(llm.wait_for_completion(use_tqdm=False)[0]) == answer(alone)
    assert len(llm.llm_engine.stats()["adapters"]) == 2


def test_a_34_a_pinned_adapter_is_refreshed_and_stays(make_engine: MakeEngine, expected: Callable) -> None:
    llm = make_engine(max_loras=2, max_cpu_loras=2)
    engine = llm.llm_engine
    for name, number in (("alpha", 1), ("beta", 2)):
        engine.add_lora(lora(name, number))
    assert engine.pin_lora(1)
    with pytest.raises(AdapterError, match="2"):
        engine.pin_lora(2)
    refreshed = engine.replace_lora(named("alpha", 1, "rank5"))
    (pinned,) = [adapter for adapter in engine.stats()["adapters"] if adapter["pinned"]]
    assert pinned["digest"] == refreshed
    reads = engine.stats()["adapter_reads"]
    for _ in range(3):
        for name, number in (("gamma", 3), ("beta", 2)):
            assert solo(llm, lora(name, number)) == expected(name)
            assert solo(llm, named("alpha", 1, "rank5")) == expected("rank5")
    # The pinned one was never read again; the others took turns, gamma's first load included.
    assert engine.stats()["adapter_reads"] - reads == 6
    assert engine.unpin_lora(1)
    assert not engine.unpin_lora(77)
    assert [adapter for adapter in engine.stats()["adapters"] if adapter["pinned"]] == []
    assert engine.pin_lora(2)
    with pytest.raises(ValidationError, match="no adapter has the id 77; loaded ids: 1, 2, 3"):
        engine.pin_lora(77)


def test_a_50_a_hundred_replacements_leave_one_version(llm: LLM) -> None:
    engine = llm.llm_engine
    arrays, config = arrays_of("fleet-00"), config_of("fleet-00")
    resident, versions = [], set()
    for number in range(100):
        tensors = {key: array + np.float32(number) for key, array in arrays.items()}
        request = LoRARequest("policy", 1, lora_tensors=tensors, peft_config=config)
        versions.add(engine.replace_lora(request))
        solo(llm, request, 2)
        resident.append((resident_bytes(), engine.stats()["adapter_bytes"], len(engine.stats()["adapters"])))
    assert len(versions) == 100
    assert {entry[1:] for entry in resident} == {(resident[0][1], 1)}
    assert resident_bytes() - resident[30][0] < max(resident[30][0] // 20, 16 * MIB)
    assert engine.remove_lora(1)
    assert engine.stats()["adapter_bytes"] == 0
