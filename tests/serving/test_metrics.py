"""What `/metrics` tells: vLLM's series for dashboards and routers, and those per adapter and per tier."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from manylora.bench.client import Answer, Client

from .conftest import ADAPTERS, PROMPT, Server, StartServer

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
OPEN = {"Accept": "application/openmetrics-text; version=1.0.0"}
# Names as the format spells them: `_total` belongs to the samples of a counter.
LIKE_VLLM = {
    "gauge": "num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state "
    "kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source "
    "prompt_tokens_cached generation_tokens request_success admission_rejections",
    "histogram": "request_prompt_tokens request_generation_tokens iteration_tokens_total "
    "request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds "
    "inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_num_preemptions request_prefill_kv_computed_tokens",
}


class Page:
    """A page of metrics, read by the parser of Prometheus's own client."""

    def __init__(self, server: Server, key: str | None = None):
        headers = OPEN if key is None else OPEN | {"Authorization": f"Bearer {key}"}
        answer = server.client.get("/metrics", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        self.types: dict[str, str] = {}
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(answer.text):
            self.types[family.name] = family.type
            for sample in family.samples:
                self.samples[sample.name].append((sample.labels, sample.value))

    def value(self, name: str, **labels: str) -> float:
        found = [value for told, value in self.samples[name] if labels.items() <= told.items()]
        assert len(found) == 1, (name, labels, self.samples[name])
        return found[0]

    def by_adapter(self, name: str, **labels: str) -> dict[str, float]:
        """Sums by adapter, of those that are not 0."""
        sums: dict[str, float] = defaultdict(float)
        for told, value in self.samples[name]:
            if labels.items() <= told.items():
                sums[told["adapter_name"]] += value
        return {name: value for name, value in sums.items() if value}

    def adapters_in_requests(self) -> tuple[str, str]:
        """What routers read: the adapters that run, and those that wait."""
        [(labels, value)] = self.samples["vllm:lora_requests_info"]
        assert set(labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        assert abs(value - time.time()) < 60
        return labels["running_lora_adapters"], labels["waiting_lora_adapters"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three adapters and one that cannot be loaded."""
    for name in ("alpha", "beta", "gamma"):
        shutil.copytree(ADAPTERS / name, tmp_path / name)
    shutil.copytree(ADAPTERS / "alpha", tmp_path / "broken")
    config = json.loads((ADAPTERS / "alpha" / "adapter_config.json").read_text())
    (tmp_path / "broken" / "adapter_config.json").write_text(json.dumps(config | {"r": 1024, "rank_pattern": {}}))
    return tmp_path


def until(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to that")


def test_a_49_who_was_served_is_told_by_adapter(start_server: StartServer, folder: Path) -> None:
    server = start_server("--max-loras", "2", "--max-cpu-loras", "2", folder=folder, **ON)
    before = Page(server)
    assert before.adapters_in_requests() == ("", "")
    assert before.by_adapter("manylora:adapter_requests_total") == {}
    assert server.load("alpha", "alpha").status_code == 200
    assert server.load("beta", "beta").status_code == 200
    assert server.load("bad", "broken").status_code == 400
    for name in ("alpha", "beta", "alpha", "base", "beta", "alpha"):
        server.text(name, max_tokens=4)
    page = Page(server)
    assert page.by_adapter("manylora:adapter_requests_total") == {"alpha": 3, "beta": 2, "base": 1}
    assert page.by_adapter("manylora:adapter_requests_total", finished_reason="length")["alpha"] == 3
    tokens = page.by_adapter("manylora:adapter_generation_tokens_total")
    assert tokens == {"alpha": 12, "beta": 8, "base": 4}
    assert page.by_adapter("manylora:adapter_prompt_tokens_total")["beta"] == 2 * len(PROMPT)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        counts = page.by_adapter(f"manylora:adapter_{name}_seconds_count")
        assert counts == {"alpha": 3, "beta": 2, "base": 1}, name
    first, whole = (
        page.by_adapter(f"manylora:adapter_{name}_seconds_sum")["alpha"]
        for name in ("time_to_first_token", "e2e_request_latency")
    )
    assert 0 < first < whole < 60
    assert page.value("manylora:adapter_loads_total") == 2
    assert page.value("manylora:adapter_load_seconds_count") == 2
    assert page.value("manylora:adapter_evictions_total") == 0
    assert page.value("manylora:adapter_load_failures_total", reason="refused") == 1
    assert page.value("manylora:adapter_load_failures_total", reason="io") == 0
    assert page.value("manylora:adapter_lookups_total") == page.value("manylora:adapter_hits_total") == 5
    assert page.value("manylora:adapters_resident", tier="host") == 2
    assert page.value("manylora:adapters_resident", tier="device") == 0
    assert page.value("manylora:adapter_bytes", tier="host") > 0
    # A third one, for which one of the two goes.
    assert server.load("gamma", "gamma").status_code == 200
    server.text("gamma", max_tokens=1)
    page = Page(server)
    assert page.value("manylora:adapter_evictions_total") == 1
    assert page.value("manylora:adapters_registered") == 3
    assert page.value("manylora:adapters_resident", tier="host") == 2
    loaded = {labels["adapter_name"]: labels for labels, _ in page.samples["vllm:lora_adapter_loaded"]}
    assert len(loaded) == 2
    rank = json.loads((ADAPTERS / "gamma" / "adapter_config.json").read_text())["r"]
    assert loaded["gamma"] == {"adapter_name": "gamma", "level": "cpu", "pinned": "false", "rank": str(rank)}
    # What is unloaded has no series any more.
    assert server.unload("alpha").status_code == 200
    page = Page(server)
    assert page.by_adapter("manylora:adapter_requests_total") == {"beta": 2, "gamma": 1, "base": 1}
    assert page.value("manylora:adapters_registered") == 2
    assert page.value("vllm:request_success_total", finished_reason="length") == 7


def test_a_49_series_are_bounded_under_churn(start_server: StartServer, folder: Path) -> None:
    server = start_server("--max-adapter-series", "4", folder=folder, **ON)
    for number in range(12):
        assert server.load(f"stays-{number}", "alpha").status_code == 200
        server.text(f"stays-{number}", max_tokens=1)
    page = Page(server)
    requests = page.by_adapter("manylora:adapter_requests_total")
    assert requests == {"stays-0": 1, "stays-1": 1, "stays-2": 1, "stays-3": 1, "other": 8}
    assert len(page.samples["vllm:lora_adapter_loaded"]) == 4
    for number in range(12):
        assert server.unload(f"stays-{number}").status_code == 200
    # Each of these finds the place of one that left, as soon as somebody has looked.
    for number in range(30):
        Page(server)
        assert server.load(f"goes-{number}", "alpha").status_code == 200
        server.text(f"goes-{number}", max_tokens=1)
        assert server.unload(f"goes-{number}").status_code == 200
    assert set(Page(server).by_adapter("manylora:adapter_requests_total")) == {"other"}
    assert Page(server).by_adapter("manylora:adapter_requests_total")["other"] == 8


def test_a_49_two_thousand_adapters_come_and_go(start_server: StartServer, tmp_path: Path) -> None:
    shown, at_once, rounds = 32, 50, 40
    config = (ADAPTERS / "sub-k" / "adapter_config.json").read_bytes()
    tensors = (ADAPTERS / "sub-k" / "adapter_model.safetensors").read_bytes()
    for number in range(at_once * rounds):
        folder = tmp_path / f"{number:04}"
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(config)
        # Its last number is its own, so that each is a version of its own.
        (folder / "adapter_model.safetensors").write_bytes(tensors[:-4] + struct.pack("<f", number / 1000))
    server = start_server("--max-adapter-series", str(shown), folder=tmp_path, **ON)
    versions: set[str] = set()

    async def call(client: Client, path: str, **fields: Any) -> Answer:
        answer = await client.send("POST", path, json.dumps(fields).encode(), 60)
        assert answer.status == 200, answer.body
        return answer

    async def come(client: Client, name: str) -> None:
        await call(client, "/v1/load_lora_adapter", lora_name=name, lora_path=name)
        served = await call(client, "/v1/completions", model=name, prompt=PROMPT, max_tokens=1)
        versions.add(served.headers["x-manylora-adapter-version"])

    async def churn() -> None:
        client = Client(server.url)
        for first in range(0, at_once * rounds, at_once):
            names = [f"{number:04}" for number in range(first, first + at_once)]
            await asyncio.gather(*(come(client, name) for name in names))
            if first % 500 == 0:
                look(at_once, first + at_once)
            await asyncio.gather(*(call(client, "/v1/unload_lora_adapter", lora_name=name) for name in names))
        client.close()

    def look(there: int, so_far: int) -> None:
        page = Page(server)
        assert page.value("manylora:adapters_registered") == there
        assert page.value("manylora:adapter_loads_total") == so_far
        for name, samples in page.samples.items():
            labels = {told["adapter_name"] for told, _ in samples if "adapter_name" in told}
            assert len(labels) <= min(there, shown) + len({"base", "other"}), name
        assert page.value("vllm:request_success_total", finished_reason="length") == so_far

    asyncio.run(churn())
    assert len(versions) == at_once * rounds
    look(0, at_once * rounds)
    page = Page(server)
    assert (
        page.value("manylora:adapters_resident", tier="host") == page.value("manylora:adapter_bytes", tier="host") == 0
    )
    assert page.value("manylora:adapter_load_failures_total", reason="io") == 0
    assert server.ids() == ["base"]


def test_a_49_routers_see_who_runs_and_who_waits(start_server: StartServer, folder: Path) -> None:
    # A name with a comma would look like two to whoever takes the lists apart: it is in none.
    modules = ("--lora-modules", "alpha=alpha", "beta=beta", json.dumps({"name": "a,b", "path": "gamma"}))
    server = start_server("--max-num-seqs", "1", "--max-loras", "1", *modules, folder=folder)
    long = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "temperature": 0}
    enough = threading.Event()

    def keep_asking(name: str) -> None:
        while not enough.is_set():
            server.post("/v1/completions", long | {"model": name})

    threads = [threading.Thread(target=keep_asking, args=[name]) for name in ("alpha", "alpha", "beta", "base", "a,b")]
    for thread in threads:
        thread.start()

    def both_are_there() -> bool:
        page = Page(server)
        waiting = page.value("vllm:num_requests_waiting")
        reasons = page.samples["vllm:num_requests_waiting_by_reason"]
        assert waiting == sum(value for _, value in reasons)
        return page.adapters_in_requests() == ("alpha", "alpha,beta")

    try:
        until(both_are_there)
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    until(lambda: Page(server).adapters_in_requests() == ("", ""))
    assert Page(server).value("vllm:num_requests_running") == 0


def test_vllms_dashboards_find_their_series(server: Server) -> None:
    server.complete("alpha", n=2, max_tokens=5, temperature=1)
    page = Page(server)
    for kind, names in LIKE_VLLM.items():
        for name in names.split():
            assert page.types.get(f"vllm:{name}") == kind, name
            suffix = {"counter": "_total", "histogram": "_count"}.get(kind, "")
            for labels, _ in page.samples[f"vllm:{name}{suffix}"]:
                assert (labels["model_name"], labels["engine"]) == ("base", "0"), name
    before = {name: page.value(f"vllm:{name}_count") for name in ("request_params_n", "e2e_request_latency_seconds")}
    tokens = page.value("vllm:generation_tokens_total"), page.value("vllm:prompt_tokens_total")
    steps = page.value("vllm:iteration_tokens_total_count"), page.value("vllm:iteration_tokens_total_sum")
    gaps = page.value("vllm:inter_token_latency_seconds_count")
    server.complete("alpha", n=2, max_tokens=6, temperature=1)
    page = Page(server)
    # One request of two samples.
    assert page.value("vllm:request_params_n_count") == before["request_params_n"] + 1
    assert page.value("vllm:e2e_request_latency_seconds_count") == before["e2e_request_latency_seconds"] + 2
    assert page.value("vllm:generation_tokens_total") == tokens[0] + 12
    assert page.value("vllm:prompt_tokens_total") == tokens[1] + 2 * len(PROMPT)
    assert page.value("vllm:inter_token_latency_seconds_count") == gaps + 10
    assert page.value("vllm:iteration_tokens_total_count") > steps[0]
    cached = page.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    computed = page.value("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert cached + computed == page.value("vllm:prompt_tokens_total")
    assert page.value("vllm:iteration_tokens_total_sum") - steps[1] >= 12
    parts = ("queue", "prefill", "decode")
    whole = page.value("vllm:e2e_request_latency_seconds_sum")
    summed = sum(page.value(f"vllm:request_{part}_time_seconds_sum") for part in parts)
    assert summed == pytest.approx(whole)
    assert page.value("vllm:cache_config_info", enable_prefix_caching="True") == 1
    assert page.value("vllm:engine_sleep_state", sleep_state="awake") == 1


def test_both_formats_tell_the_same(server: Server) -> None:
    plain = server.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family.type for family in plain_families(plain.text)}
    assert families["vllm:generation_tokens"] == "counter"
    assert families == Page(server).types


def test_names_cannot_break_the_page(start_server: StartServer, folder: Path) -> None:
    server = start_server(folder=folder, **ON)
    name = 'we"ird\\{} 1'
    assert server.load(name, "alpha").status_code == 200
    server.text(name, max_tokens=1)
    assert Page(server).by_adapter("manylora:adapter_requests_total") == {name: 1}


def test_http_requests_are_counted_by_route(server: Server) -> None:
    def count(handler: str, status: str) -> float:
        counted = Page(server).samples["http_requests_total"]
        found = [value for told, value in counted if (told["handler"], told["status"]) == (handler, status)]
        return sum(found)

    good, bad = count("/v1/completions", "2xx"), count("/v1/completions", "4xx")
    server.text("alpha", max_tokens=1)
    server.complete("nobody")
    server.client.get("/v1/models/alpha")
    server.client.get("/nowhere/at/all")
    assert count("/v1/completions", "2xx") == good + 1
    assert count("/v1/completions", "4xx") == bad + 1
    assert count("/v1/models/{*name}", "2xx") >= 1
    assert count("none", "4xx") >= 1
    page = Page(server)
    handlers = {labels["handler"] for labels, _ in page.samples["http_requests_total"]}
    assert not handlers & {"/metrics", "/health", "/nowhere/at/all"}
    assert page.value("http_request_duration_seconds_count", handler="/v1/completions", method="POST") >= good + 1


def test_requests_that_are_dropped_are_aborted(server: Server) -> None:
    def aborted() -> tuple[float, float]:
        page = Page(server)
        mine = page.by_adapter("manylora:adapter_requests_total", finished_reason="abort")
        return mine.get("beta", 0), page.value("vllm:request_success_total", finished_reason="abort")

    before = aborted()
    body = {"model": "beta", "prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until(lambda: aborted() == (before[0] + 1, before[1] + 1))
