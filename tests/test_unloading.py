"""Adapters unloaded under traffic: nothing stays behind, nobody else is touched, and no wait is endless."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import MIB, PROMPT, MakeEngine, answer, greedy, logits_of, lora, named, resident_bytes, solo
from manylora import LLM, LoRARequest, ValidationError
from manylora.exceptions import AdapterTimeoutError, UnknownAdapterError

MakeAdapter = Callable[..., str]


def test_a_50_a_hundred_registered_used_and_removed(llm: LLM, make_adapter: MakeAdapter) -> None:
    start, resident = llm.llm_engine.stats(), []
    paths = [make_adapter(f"many-{number}", "fleet-00", seed=number) for number in range(20)]
    for number in range(100):
        request = LoRARequest(f"many-{number}", 1 + number, paths[number % 20])
        assert llm.llm_engine.register_loras([request]) == {}
        solo(llm, request, 2)
        assert llm.llm_engine.stats()["adapter_bytes"] > 0
        assert llm.llm_engine.remove_lora(1 + number)
        resident.append(resident_bytes())
    end = llm.llm_engine.stats()
    for level in ("adapter_bytes", "loading_bytes", "total_blocks", "adapters", "running", "waiting"):
        assert end[level] == start[level], level
    assert end["adapter_reads"] == 100
    gc.collect()
    assert resident_bytes() - resident[30] < max(resident[30] // 20, 16 * MIB)


@pytest.fixture
def busy(make_engine: MakeEngine) -> Iterator[LLM]:
    """An engine with three requests running on `alpha` and two waiting, some thousand steps from their end."""
    llm = make_engine(max_num_seqs=3, max_model_len=512)
    llm.enqueue([PROMPT] * 5, greedy(480), lora_request=lora("alpha", 1))
    yield llm
    llm.llm_engine.remove_lora(1, mode="abort")


def finish(llm: LLM) -> list[str | None]:
    return [output.outputs[0].finish_reason for output in llm.wait_for_completion(use_tqdm=False)]


def test_a_51_drain_lets_all_five_finish(busy: LLM) -> None:
    assert busy.llm_engine.remove_lora(1)
    assert busy.llm_engine.list_loras() == set()
    stats = busy.llm_engine.stats()
    assert (stats["running"], stats["waiting"], stats["adapter_bytes"]) == (0, 0, 0)
    assert finish(busy) == ["length"] * 5
    with pytest.raises(UnknownAdapterError):
        logits_of(busy, PROMPT, "alpha")
    assert not busy.llm_engine.remove_lora(1)


def test_a_51_abort_ends_them_and_says_so(busy: LLM) -> None:
    assert busy.llm_engine.remove_lora(1, mode="abort")
    assert busy.llm_engine.stats()["adapter_bytes"] == 0
    reasons = finish(busy)
    assert set(reasons) <= {"abort", "length"}
    assert reasons.count("abort") >= 2
    # The shelf takes it again at once.
    assert solo(busy, lora("alpha", 1))


def test_a_51_a_timeout_is_reported_and_can_be_followed_by_abort(make_engine: MakeEngine, expected: Callable) -> None:
    # So slow, one row at a time and each with all logprobs, that nothing ends on its own.
    llm = make_engine(max_num_seqs=1, max_model_len=512)
    llm.enqueue([PROMPT] * 200, greedy(500), lora_request=lora("alpha", 1))
    with pytest.raises(AdapterTimeoutError, match=r"`alpha` is still held by `\d+` requests after `0.2` s") as late:
        llm.llm_engine.remove_lora(1, timeout=0.2)
    assert isinstance(late.value, TimeoutError)
    assert late.value.kind == "timeout"
    # No new ones, from the start; and other adapters come and go as ever.
    assert llm.llm_engine.list_loras() == set()
    with pytest.raises(UnknownAdapterError):
        logits_of(llm, PROMPT, "alpha")
    assert llm.llm_engine.add_lora(lora("beta", 2))
    assert llm.llm_engine.remove_lora(2)
    with pytest.raises(AdapterTimeoutError):
        llm.llm_engine.remove_lora(1, timeout=0)
    assert llm.llm_engine.remove_lora(1, mode="abort")
    assert not llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.stats()["adapter_bytes"] == 0
    reasons = finish(llm)
    assert set(reasons) <= {"abort", "length"}
    assert reasons[-1] == "abort"
    assert solo(llm, lora("alpha", 1)) == expected("alpha")


def test_a_51_ctrl_c_ends_the_wait_and_not_the_engine(make_engine: MakeEngine, expected: Callable) -> None:
    llm = make_engine(max_num_seqs=1, max_model_len=512)
    llm.enqueue([PROMPT] * 200, greedy(500), lora_request=lora("alpha", 1))
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.llm_engine.remove_lora(1)
    timer.join()
    assert llm.llm_engine.list_loras() == set()
    assert llm.llm_engine.remove_lora(1, mode="abort")
    assert finish(llm)[-1] == "abort"
    assert solo(llm, lora("alpha", 1)) == expected("alpha")


def test_a_51_an_unknown_mode_changes_nothing(llm: LLM) -> None:
    llm.llm_engine.add_lora(lora("alpha", 1))
    with pytest.raises(ValidationError, match="mode must be drain or abort, got `now`"):
        llm.llm_engine.remove_lora(1, mode="now")
    assert llm.llm_engine.list_loras() == {1}
    for never in (0, -1, 2**63, 2**70):
        assert not llm.llm_engine.remove_lora(never)


def test_a_51_a_name_used_anew_is_not_unloaded_for_the_old_one(llm: LLM, expected: Callable) -> None:
    llm.enqueue([PROMPT] * 60, greedy(400), lora_request=named("x", 1, "alpha"))
    with pytest.raises(AdapterTimeoutError):
        llm.llm_engine.remove_lora(1, timeout=0)
    assert llm.llm_engine.add_lora(named("x", 2, "beta"))
    assert not llm.llm_engine.remove_lora(1, mode="abort")
    assert solo(llm, named("x", 2, "beta")) == expected("beta")
    assert finish(llm) == ["length"] * 60


def test_a_52_unloading_one_touches_nothing_else(llm: LLM, expected: Callable) -> None:
    params = greedy(300)
    requests = [None, lora("beta", 2)]
    alone = [answer(llm.generate(PROMPT, params, use_tqdm=False, lora_request=one)[0]) for one in requests]
    conversation = [{"role": "user", "content": "How many?"}]

    def chat(request: LoRARequest | None) -> list[tuple[Any, ...]]:
        return answer(llm.chat(conversation, greedy(8), use_tqdm=False, lora_request=request)[0])

    chats = [chat(request) for request in requests]
    llm.llm_engine.add_lora(lora("alpha", 1))
    llm.enqueue([PROMPT] * 2, params, lora_request=requests)
    assert llm.llm_engine.remove_lora(1)
    assert [chat(request) for request in requests] == chats
    assert llm.llm_engine.add_lora(lora("gamma", 3))
    assert llm.llm_engine.list_loras() == {2, 3}
    assert [chat(request) for request in requests] == chats
    assert [answer(output) for output in llm.wait_for_completion(use_tqdm=False)] == alone
    assert solo(llm, lora("gamma", 3)) == expected("gamma")
    with pytest.raises(UnknownAdapterError, match="loaded: beta, gamma"):
        logits_of(llm, PROMPT, "alpha")
