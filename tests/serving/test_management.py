"""Adapters loaded, replaced, unloaded and pinned while the server runs; and who may do that."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from .conftest import ADAPTERS, PROMPT, Server, StartServer, events

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pin_lora_adapter")


@pytest.fixture
def managed(start_server: StartServer) -> Server:
    """A server without adapters that can be managed from this machine."""
    return start_server(**ON)


def test_load_query_unload_query(managed: Server) -> None:
    assert managed.complete("alpha").status_code == 404
    loaded = managed.load("alpha", "alpha")
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'alpha' added successfully."
    assert managed.ids() == ["base", "alpha"]
    # As it was given.
    assert managed.client.get("/v1/models/alpha").json()["root"] == "alpha"
    assert managed.text("alpha") != managed.text("base")
    gone = managed.unload("alpha")
    assert gone.text == "Success: LoRA adapter 'alpha' removed successfully."
    assert managed.complete("alpha").status_code == 404
    assert managed.ids() == ["base"]


def test_vllm_answers_to_what_cannot_be(managed: Server) -> None:
    cases = [
        (managed.load("", "x"), 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (managed.load("x", ""), 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (managed.load("base", "alpha"), 400, "The lora adapter 'base' conflicts with a served base model."),
        (managed.load("base", "alpha", load_inplace=True), 400, "conflicts with a served base model."),
        (managed.load("x", "missing"), 404, "Loading lora x failed: No adapter found for missing"),
        (managed.unload(""), 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (managed.unload("x"), 404, "The lora adapter 'x' cannot be found."),
        (managed.post(ROUTES[0], {"lora_name": "x"}), 400, "1 validation error"),
    ]
    for answer, status, message in cases:
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]


def test_a_25_other_content_needs_the_flag_and_the_same_is_no_change(managed: Server) -> None:
    assert managed.load("x", "alpha").status_code == 200
    first = managed.text("x")
    assert managed.load("x", "alpha").status_code == 200
    refused = managed.load("x", "beta")
    assert refused.status_code == 400
    assert "has already been loaded" in refused.json()["error"]["message"]
    assert managed.text("x") == first
    assert managed.load("x", "beta", load_inplace=True).status_code == 200
    second = managed.text("x")
    assert second != first
    version = managed.client.get("/v1/models/x").json()["version"]
    stale = managed.load("x", "alpha", load_inplace=True, expected_version="0" * 64)
    assert stale.status_code == 400, stale.text
    assert managed.text("x") == second
    assert managed.load("x", "alpha", load_inplace=True, expected_version=version).status_code == 200
    assert managed.text("x") == first


def test_a_22_what_cannot_be_loaded_says_why_at_once(managed: Server, tmp_path: Path) -> None:
    folder = ADAPTERS / "alpha"
    assert managed.load("x", folder / "adapter_config.json").status_code == 400
    assert managed.load("x", "org/some-hub-id").status_code == 404
    assert managed.ids() == ["base"]
    assert managed.load("x", folder).status_code == 200
    assert managed.text("x")


@pytest.mark.parametrize("unreadable", [".", "adapter_config.json", "adapter_model.safetensors"])
def test_a_22_what_may_not_be_read_is_403(start_server: StartServer, tmp_path: Path, unreadable: str) -> None:
    shutil.copytree(ADAPTERS / "alpha", tmp_path / "alpha")
    server = start_server(folder=tmp_path, **ON)
    mode = (tmp_path / "alpha" / unreadable).stat().st_mode
    (tmp_path / "alpha" / unreadable).chmod(0)
    answer = server.load("x", "alpha")
    (tmp_path / "alpha" / unreadable).chmod(mode)
    assert answer.status_code == 403, answer.text
    assert "denied" in answer.json()["error"]["message"]
    assert server.ids() == ["base"]
    assert server.load("x", "alpha").status_code == 200
    assert server.text("x")


def test_broken_adapters_are_400_and_name_the_key(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(folder=tmp_path, **ON)
    config = json.loads((ADAPTERS / "alpha" / "adapter_config.json").read_text())
    for name, change, told in (
        ("rank", {"r": 1024, "rank_pattern": {}}, "max_lora_rank"),
        ("dora", {"use_dora": True}, "DoRA"),
        ("saved", {"modules_to_save": ["score"]}, "score"),
    ):
        shutil.copytree(ADAPTERS / "alpha", tmp_path / name)
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config | change))
        answer = server.load(name, name)
        assert answer.status_code == 400, (name, answer.text)
        assert told in answer.json()["error"]["message"], answer.text
    (tmp_path / "rank" / "adapter_config.json").write_text("this is not json")
    assert server.load("text", "rank").status_code == 400
    assert server.ids() == ["base"]


def test_a_48_management_is_off_by_default(server: Server) -> None:
    for route in ROUTES:
        answer = server.post(route, {"lora_name": "alpha", "lora_path": "alpha"})
        assert answer.status_code == 404
    assert server.complete("alpha").status_code == 200


@pytest.mark.parametrize("flags", [("--admin-api-key", "secret"), ("--api-key", "user"), ("--host", "0.0.0.0")])
def test_a_48_no_route_changes_anything_without_the_admin_key(
    start_server: StartServer, flags: tuple[str, str]
) -> None:
    server = start_server(*flags, **ON)
    server.client.base_url = server.url.replace("0.0.0.0", "127.0.0.1")
    body = {"lora_name": "alpha", "lora_path": "alpha"}
    for route in ROUTES:
        for headers in (
            {},
            {"Authorization": "Bearer user"},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
        ):
            answer = server.post(route, body, **headers)
            assert answer.status_code == 401, (route, headers)
            assert "Authorization" in answer.json()["error"]["message"]
    key = flags[1]
    if flags[0] != "--admin-api-key":
        assert "Authorization: Bearer mlr-" in server.log
        key = server.log.split("Authorization: Bearer ")[1].split("'")[0]
    assert server.post(ROUTES[0], body, Authorization=f"Bearer {key}").status_code == 200


def test_a_48_the_loopback_rule(managed: Server) -> None:
    body = {"lora_name": "alpha", "lora_path": "alpha"}
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Via": "1.1 proxy"},
        {"X-Real-IP": "127.0.0.1"},
    ):
        assert managed.post(ROUTES[0], body, **headers).status_code == 401, headers
    plain = managed.client.post(ROUTES[0], content=json.dumps(body), headers={"Content-Type": "text/plain"})
    assert plain.status_code == 400
    assert managed.ids() == ["base"]
    assert managed.post(ROUTES[0], body, Origin="http://localhost:3000").status_code == 200


def test_a_48_paths_are_confined(start_server: StartServer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copytree(ADAPTERS / "alpha", root / "alpha")
    shutil.copytree(ADAPTERS / "beta", tmp_path / "beta")
    (root / "link").symlink_to(tmp_path / "beta")
    (root / "inside").symlink_to(root / "alpha")
    server = start_server("--lora-root", str(root), **ON)
    for path in ("/etc", "../beta", "alpha/../../beta", str(tmp_path / "beta"), "link"):
        answer = server.load("x", path)
        assert answer.status_code == 403, (path, answer.text)
        assert str(tmp_path) not in answer.json()["error"]["message"] or str(tmp_path) in path
    # Whether something exists out there is not told.
    assert server.load("x", "/etc/nothing-there").status_code == 403
    assert server.load("x", "inside").status_code == 200


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"])
def test_a_48_files_are_confined(start_server: StartServer, tmp_path: Path, file: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(ADAPTERS / "alpha", root / "alpha")
    shutil.copytree(ADAPTERS / "alpha", outside)
    (outside / "tokenizer.json").write_text("{}")
    server = start_server("--lora-root", str(root), "--lora-resolve-root", str(root), **ON)
    path = root / "alpha" / file
    for target, statuses in ((outside / file, (403, 400)), (Path("/dev/zero"), (403, 400)), (None, (400, 400))):
        path.unlink(missing_ok=True)
        os.mkfifo(path) if target is None else path.symlink_to(target)
        answers = [server.load("x", "alpha"), server.complete("alpha")]
        assert tuple(answer.status_code for answer in answers) == statuses, [answer.text for answer in answers]
        for answer in answers:
            told = "is not a regular file" if target is None else "leaves the folder"
            assert told in answer.json()["error"]["message"]
            assert str(outside) not in answer.text
        # A name that was refused is looked for again after a while.
        time.sleep(2.1)
    path.unlink()
    if file != "tokenizer.json":
        shutil.copy(outside / file, path)
    assert server.load("x", "alpha").status_code == 200
    assert server.text("x") == server.text("alpha") != server.text("base")


def test_user_keys_guard_what_costs_something(start_server: StartServer) -> None:
    server = start_server("--api-key", "one", "--api-key", "two")
    for path in ("/v1/models", "/v1/models/base"):
        assert server.client.get(path).status_code == 401
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = server.post(path, {"prompt": "x"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.client.get("/health").status_code == 200
    for key in ("one", "two"):
        body = {"prompt": PROMPT, "max_tokens": 1}
        assert server.post("/v1/completions", body, Authorization=f"Bearer {key}").status_code == 200


def test_a_52_removing_one_leaves_the_others(managed: Server) -> None:
    managed.load("a", "alpha")
    managed.load("b", "beta")
    before = managed.text("b"), managed.text("base")
    managed.unload("a")
    assert managed.complete("a").status_code == 404
    assert (managed.text("b"), managed.text("base")) == before
    managed.load("c", "gamma")
    assert (managed.text("b"), managed.text("base")) == before


def test_a_46_names_are_opaque(managed: Server) -> None:
    for name in ("org/ad@v2", "base:ad", "a=b", "..", "x" * 300, "ünïcode", "a b"):
        assert managed.load(name, "alpha").status_code == 200, name
        answer = managed.complete(name)
        assert answer.status_code == 200, name
        assert answer.json()["model"] == name
    assert managed.client.get("/v1/models/org/ad@v2").json()["id"] == "org/ad@v2"
    for name in (" ", "a\nb"):
        assert managed.load(name, "alpha").status_code == 400, name


def test_a_34_pins_over_http(start_server: StartServer) -> None:
    server = start_server("--max-loras", "2", "--max-cpu-loras", "2", **ON)
    for name in ("alpha", "beta", "gamma"):
        assert server.load(name, name).status_code == 200
    assert server.post(ROUTES[2], {"lora_name": "alpha"}).status_code == 200
    last = server.post(ROUTES[2], {"lora_name": "beta"})
    assert last.status_code == 400, last.text
    assert "max_loras" in last.json()["error"]["message"] or "pin" in last.json()["error"]["message"]
    assert server.text("gamma")
    assert server.load("alpha", "beta", load_inplace=True).status_code == 200
    assert server.post(ROUTES[2], {"lora_name": "alpha", "pinned": False}).status_code == 200
    assert server.post(ROUTES[2], {"lora_name": "nope"}).status_code == 404


def test_a_51_unload_drains_aborts_and_gives_up_waiting(managed: Server) -> None:
    long = {"model": "alpha", "prompt": [PROMPT] * 32, "max_tokens": 300, "ignore_eos": True, "stream": True}

    def run_three() -> tuple[list[threading.Thread], list[str]]:
        started, reasons = threading.Semaphore(0), []

        def run() -> None:
            with managed.client.stream("POST", "/v1/completions", json=long) as answer:
                started.release()
                answer.read()
                choices = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
                reasons.extend(choice["finish_reason"] for choice in choices if choice["finish_reason"])

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            started.acquire()
        return threads, reasons

    managed.load("alpha", "alpha")
    threads, reasons = run_three()
    late = managed.unload("alpha", timeout=0)
    assert late.status_code == 409, late.text
    assert "still held by" in late.json()["error"]["message"]
    assert managed.complete("alpha").status_code == 404
    for thread in threads:
        thread.join()
    assert reasons == ["length"] * 96
    managed.load("alpha", "alpha")
    threads, reasons = run_three()
    assert managed.unload("alpha", mode="abort").status_code == 200
    for thread in threads:
        thread.join()
    assert len(reasons) == 96
    assert set(reasons) in ({"abort"}, {"abort", "length"})
    assert managed.load("alpha", "alpha").status_code == 200


def test_a_51_a_plain_unload_waits_for_whoever_has_the_adapter(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "24", **ON)
    server.load("alpha", "alpha")
    ended: list[bool] = []
    reasons: list[str] = []

    def run() -> None:
        answer = server.complete("alpha", prompt=[PROMPT] * 8, max_tokens=400)
        reasons.extend(choice["finish_reason"] for choice in answer.json()["choices"])
        ended.append(True)

    # Three run, two wait for them.
    threads = [threading.Thread(target=run) for _ in range(5)]
    for thread in threads:
        thread.start()
    while gauge(server, "vllm:num_requests_running") < 24 or gauge(server, "vllm:num_requests_waiting") < 16:
        assert not ended
    unloaded: list[tuple[int, float, float]] = []

    def unload_all() -> None:
        status = server.unload("alpha").status_code
        counts = [gauge(server, f"vllm:num_requests_{state}") for state in ("running", "waiting")]
        unloaded.append((status, *counts))

    unload = threading.Thread(target=unload_all)
    unload.start()
    while "alpha" in server.ids():
        assert not ended
    # What is new finds nobody, others are loaded and served meanwhile.
    assert server.complete("alpha").status_code == 404
    assert server.load("beta", "beta").status_code == 200
    assert not ended
    for thread in (*threads, unload):
        thread.join()
    assert reasons == ["length"] * 40
    # Once it was told, none of them was left.
    assert unloaded == [(200, 0, 0)]
    assert gauge(server, "vllm:num_cpu_loaded_lora_adapters") == 1
    assert server.load("alpha", "alpha").status_code == 200


def gauge(server: Server, name: str) -> float:
    """The value of a metric that has one series."""
    lines = server.client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith((name + " ", name + "{"))).rsplit(" ", 1)[1])


def test_a_24_many_loads_at_once_are_one(managed: Server) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(managed.load("x", "alpha").status_code)) for _ in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 30
    assert managed.ids() == ["base", "x"]
    assert managed.text("x")


def test_c_21_bad_loads_do_not_hurt_good_requests(managed: Server) -> None:
    managed.load("alpha", "alpha")
    expected = managed.text("alpha", max_tokens=100)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(managed.text("alpha", max_tokens=100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    statuses = [managed.load(f"bad-{number}", ("missing", "dora-all")[number % 2]).status_code for number in range(50)]
    for thread in threads:
        thread.join()
    assert set(statuses) <= {400, 404}
    assert texts == [expected] * 8
    assert managed.load("beta", "beta").status_code == 200
