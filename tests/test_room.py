"""Room on the shelf: what adapters take, which of them go when there is not enough, and which never do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conftest import MIB, PROMPT, MakeEngine, adapter_path, answer, greedy, lora, solo
from manylora import AdapterError, LoRARequest
from manylora.exceptions import RequestError
from test_memory_adapters import given

MakeAdapter = Callable[..., str]


@pytest.mark.parametrize("eviction", ["lru", "cost_aware"])
def test_a_30_registered_adapters_answer_in_turn(eviction: str, make_engine: MakeEngine, expected: Callable) -> None:
    llm = make_engine(max_loras=1, max_cpu_loras=2, lora_eviction=eviction, loader_threads=1)
    names = ["fleet-00", "fleet-01", "fleet-02", "fleet-03", "fleet-04", "fleet-05"]
    requests = [lora(name, number) for number, name in enumerate(names, start=1)]
    assert llm.llm_engine.register_loras(requests) == {}
    for _ in range(5):
        for name, request in zip(names, requests, strict=True):
            assert solo(llm, request) == expected(name)
            assert len(llm.llm_engine.stats()["adapters"]) <= 2
    together = llm.generate([PROMPT] * 6, greedy(8, logprobs=1), use_tqdm=False, lora_request=requests)
    assert [answer(output) for output in together] == [expected(name) for name in names]


def test_a_54_kv_blocks_fall_by_what_is_resident(make_engine: MakeEngine, make_adapter: MakeAdapter) -> None:
    blocks = set()
    for max_loras in (1, 8, 64):
        for max_lora_rank in (8, 64):
            llm = make_engine(max_loras=max_loras, max_lora_rank=max_lora_rank, kv_cache_memory_bytes=4 * MIB)
            info = llm.llm_engine.core.info()
            blocks.add((info.kv_blocks, llm.llm_engine.stats()["total_blocks"]))
    assert blocks == {(4 * MIB // info.block_bytes,) * 2}
    sizes = {}
    for number in range(64):
        path = adapter_path("rank64") if number == 63 else make_adapter(f"eight-{number}", "pattern", seed=number)
        llm.llm_engine.add_lora(LoRARequest(f"a{number}", 1 + number, path))
        stats = llm.llm_engine.stats()
        resident = {adapter["digest"]: adapter["bytes"] for adapter in stats["adapters"]}
        report = llm.load_report(f"a{number}")
        assert resident[report["version"]] == report["bytes"]
        sizes[number] = report["bytes"]
        assert stats["adapter_bytes"] == sum(resident.values())
        assert stats["total_blocks"] == (stats["ledger_bytes"] - stats["adapter_bytes"]) // info.block_bytes
    # Each takes what it has: the large one does not make the small ones larger.
    assert {sizes[number] for number in range(63)} == {sizes[0]}
    assert sizes[63] > 3 * sizes[0]


def test_memory_adapters_stay_while_others_come_and_go(make_engine: MakeEngine, expected: Callable) -> None:
    llm = make_engine(max_loras=1, max_cpu_loras=2)
    kept = given("alpha", 1)
    llm.llm_engine.add_lora(kept)
    reads = llm.llm_engine.stats()["adapter_reads"]
    for _ in range(2):
        for number, name in enumerate(("beta", "gamma", "rank5"), start=2):
            assert solo(llm, lora(name, number)) == expected(name)
            assert solo(llm, kept) == expected("alpha")
    assert llm.llm_engine.stats()["adapter_reads"] - reads == 6
    # A second one leaves no room for those of folders, which say so; when it is gone they are served again.
    assert llm.llm_engine.add_lora(given("qv", 8))
    with pytest.raises(AdapterError, match=r"max_cpu_loras|2") as refusal:
        llm.llm_engine.add_lora(given("sub-q", 9))
    assert refusal.value.kind == "operation"
    with pytest.raises(RequestError, match="2"):
        solo(llm, lora("beta", 2))
    assert solo(llm, kept) == expected("alpha")
    assert llm.llm_engine.remove_lora(8)
    assert solo(llm, lora("beta", 2)) == expected("beta")
    assert solo(llm, kept) == expected("alpha")
    assert llm.llm_engine.list_loras() == {1, 2, 3, 4}


def test_memory_adapters_are_refused_where_bytes_are_short(make_engine: MakeEngine, expected: Callable) -> None:
    sizes = make_engine()
    for name, number in (("alpha", 1), ("rank64", 2)):
        sizes.llm_engine.add_lora(lora(name, number))
    alpha, large = (sizes.load_report(name)["bytes"] for name in ("alpha", "rank64"))
    room = large + alpha // 2
    llm = make_engine(lora_memory_bytes=room)
    kept = given("alpha", 1)
    llm.llm_engine.add_lora(kept)
    for request in (given("rank64", 2), lora("rank64", 3)):
        with pytest.raises(AdapterError) as refusal:
            llm.llm_engine.add_lora(request)
        assert str(room) in str(refusal.value)
        assert str(alpha + large) in str(refusal.value)
    assert llm.llm_engine.list_loras() == {1}
    assert solo(llm, kept) == expected("alpha")
    # Without the one from memory there is room.
    assert llm.llm_engine.remove_lora(1)
    assert solo(llm, given("rank64", 2)) == expected("rank64")
