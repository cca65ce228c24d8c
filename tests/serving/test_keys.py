"""A keys file: what each key may name, how much it may ask for, and changing it while the server runs."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from .conftest import ADAPTERS, PROMPT, Server, StartServer
from .test_metrics import Page

REJECTIONS = "vllm:admission_rejections_total{"
# Of each of two who compete.
SAMPLES = 150
MODULES = ("--lora-modules", *(f"{name}={ADAPTERS / name}" for name in ("alpha", "beta", "gamma")))


def write(path: Path, *entries: str) -> None:
    path.write_text("keys:\n" + ("" if entries else "  []\n") + "".join(f"  - {entry}\n" for entry in entries))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    write(
        path,
        "{name: all, key: k-all}",
        "{name: one, key: k-one, adapters: [alpha], base: false}",
        "{name: some, key: k-some, adapters: [], requests_per_minute: 2}",
        "{name: few, key: k-few, adapters: [be*], max_concurrent: 2, weight: 2}",
    )
    return path


def ask(server: Server, key: str | None, model: str | None = "base", **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 2, **({} if model is None else {"model": model}), **fields}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.client.post("/v1/completions", json=body, headers=headers)


def ids(server: Server, key: str) -> list[str]:
    answer = server.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    return [model["id"] for model in answer.json()["data"]]


_MARKS = itertools.count()


def reload(server: Server, path: Path, *entries: str) -> None:
    """Let the server read these keys, and wait until it has taken them."""
    mark = f"k-mark-{next(_MARKS)}"
    write(path, *entries, f"{{name: {mark}, key: {mark}}}")
    server.process.send_signal(signal.SIGHUP)
    headers = {"Authorization": f"Bearer {mark}"}
    deadline = time.monotonic() + 20
    while server.client.get("/v1/models", headers=headers).status_code != 200:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)


def reload_until(server: Server, is_done: Callable[[], bool], patience: float = 20) -> None:
    server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + patience
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_done()


def test_a_48_each_key_has_its_adapters(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file))
    assert ask(server, None).status_code == ask(server, "wrong").status_code == 401
    assert ids(server, "k-all") == ["base", "alpha", "beta", "gamma"]
    assert ids(server, "k-one") == ["alpha"]
    assert ids(server, "k-few") == ["base", "beta"]
    assert ask(server, "k-one", "alpha").status_code == 200
    # Others' adapters, and the base, do not exist for it.
    for model in ("beta", "base", None):
        answer = ask(server, "k-one", model)
        assert answer.status_code == 404, model
        assert "does not exist" in answer.json()["error"]["message"]
    for fields in ({"adapter_id": "beta"}, {"lora": [{"id": "beta"}]}):
        assert ask(server, "k-few", "base", **fields).status_code == 200
        assert ask(server, "k-one", "alpha", **fields).status_code == 404
    # An adapter without strength would be the base under another name.
    for fields in ({"lora_scale": 0}, {"lora_scale": 1e-30}, {"lora_scale": 2}):
        weak = ask(server, "k-one", "alpha", **fields)
        assert weak.status_code == 403, fields
        assert "leave scales out" in weak.json()["error"]["message"]
    listed = ask(server, "k-one", None, lora=[{"id": "alpha", "scale": 0}])
    assert listed.status_code == 403
    assert ask(server, "k-few", "beta", lora_scale=0).status_code == 200
    one = {"Authorization": "Bearer k-one"}
    assert server.client.get("/v1/models/beta", headers=one).status_code == 404
    assert server.client.post("/tokenize", json={"model": "beta", "prompt": "x"}, headers=one).status_code == 404


def test_limits_answer_429(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file))
    assert [ask(server, "k-some").status_code for _ in range(3)] == [200, 200, 429]
    late = ask(server, "k-some")
    assert late.json()["error"]["type"] == "RateLimitError"
    assert 1 <= int(late.headers["retry-after"]) <= 30
    # Every sequence counts, so that one request is no way around.
    for fields in ({"n": 3, "temperature": 1}, {"prompt": [PROMPT] * 3}):
        much = ask(server, "k-few", "beta", **fields)
        assert much.status_code == 400
        assert "`3` sequences" in much.json()["error"]["message"]
    assert ask(server, "k-few", "beta", n=2, temperature=1).status_code == 200
    assert ask(server, "k-all", n=3, temperature=1).status_code == 200

    def turned_away(reason: str) -> float:
        page = server.client.get("/metrics", headers={"Authorization": "Bearer k-all"}).text
        [line] = [line for line in page.splitlines() if line.startswith(REJECTIONS) and f'reason="{reason}"' in line]
        return float(line.rsplit(" ", 1)[1])

    # Nothing that is wrong for good is among those who may come again.
    assert (turned_away("rate_limit"), turned_away("max_concurrent"), turned_away("max_pending")) == (2, 0, 0)
    stream = {"prompt": [PROMPT] * 2, "model": "beta", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer k-few"}
    with server.client.stream("POST", "/v1/completions", json=stream, headers=headers) as running:
        assert running.status_code == 200
        assert ask(server, "k-few", "beta").status_code == 429
    assert (turned_away("rate_limit"), turned_away("max_concurrent")) == (2, 1)


def test_metrics_are_for_keys_that_may_see_all(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file), "--admin-api-key", "k-admin")

    def looked(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.client.get("/metrics", headers=headers).status_code

    assert [looked(key) for key in (None, "wrong", "k-one", "k-all", "k-admin")] == [401, 401, 403, 200, 200]
    # Whoever is in the file: it tells of all adapters.
    write(file, "{name: other, key: k-other}")
    reload_until(server, lambda: looked("k-other") == 200)
    assert [looked(key) for key in (None, "k-one", "k-all", "k-admin")] == [401, 401, 401, 200]
    write(file)
    reload_until(server, lambda: looked("k-other") == 401)
    assert [looked(key) for key in (None, "k-one", "k-admin")] == [401, 401, 200]


def test_a_key_gets_its_weights_share_and_a_reload_changes_it(start_server: StartServer, file: Path) -> None:
    write(file, "{name: one, key: k-one, weight: 4}", "{name: two, key: k-two}")
    server = start_server(*MODULES, "--keys-file", str(file), "--max-num-seqs", "2")
    server.client.timeout = httpx.Timeout(300)

    def tokens() -> dict[str, float]:
        """What has been generated for each adapter, of samples that have ended: all of one moment."""
        served = Page(server, "k-one").by_adapter("manylora:adapter_generation_tokens_total")
        return {name: served.get(name, 0.0) for name in ("alpha", "beta")}

    def compete(favoured: tuple[str, str], other: tuple[str, str]) -> float:
        """Let two keys ask for as much; how much more the favoured one gets while both have something to run."""
        for _ in range(5):
            looks = look_at(favoured, other)
            half = len(looks) // 2
            # On average over many looks: what has ended is told some time later.
            gained = [
                sum(look[who] for look in looks[-half:]) - sum(look[who] for look in looks[:half]) for who in (0, 1)
            ]
            if half >= 5 and max(looks[-1]) - max(looks[0]) > SAMPLES / 2 * 400:
                return gained[0] / gained[1]
        pytest.fail("there was no time to look at them")

    def look_at(favoured: tuple[str, str], other: tuple[str, str]) -> list[list[float]]:
        """What both have, again and again as long as both have something to run."""
        answers: list[int] = []

        def run(key: str, adapter: str) -> None:
            fields: dict[str, Any] = {"prompt": [PROMPT] * SAMPLES, "max_tokens": 400, "ignore_eos": True}
            answers.append(ask(server, key, adapter, **fields).status_code)

        before = tokens()
        threads = [threading.Thread(target=run, args=who) for who in (other, favoured)]
        for thread in threads:
            thread.start()
        looks = []
        while all(thread.is_alive() for thread in threads):
            now = tokens()
            looks.append([now[who[1]] - before[who[1]] for who in (favoured, other)])
        for thread in threads:
            thread.join()
        assert answers == [200, 200]
        # Between the first sample of each and the last of one of them.
        return [look for look in looks if min(look) >= 400 and max(look) < SAMPLES * 400]

    # Four times as much, give or take the samples that run.
    one, two = ("k-one", "alpha"), ("k-two", "beta")
    assert 2 < compete(one, two) < 8
    reload(server, file, "{name: one, key: k-one}", "{name: two, key: k-two, weight: 4}")
    assert 2 < compete(two, one) < 8
    # Without weights all are equal again.
    reload(server, file, "{name: one, key: k-one}", "{name: two, key: k-two}")
    assert 0.6 < compete(one, two) < 1.6


def test_a_reload_changes_limits_and_gives_nothing_back(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file))
    assert [ask(server, "k-some").status_code for _ in range(3)] == [200, 200, 429]
    # The same limit under another key of the same owner: what was used up stays used up.
    reload(server, file, "{name: some, key: k-new, requests_per_minute: 2}")
    assert ask(server, "k-some").status_code == 401
    assert ask(server, "k-new").status_code == 429
    reload(server, file, "{name: some, key: k-new}")
    assert {ask(server, "k-new").status_code for _ in range(6)} == {200}
    # Who had no limit has not used it up.
    reload(server, file, "{name: some, key: k-new, requests_per_minute: 3}")
    assert [ask(server, "k-new").status_code for _ in range(4)] == [200, 200, 200, 429]
    # Who has left, and comes back, begins as everybody does.
    reload(server, file)
    assert ask(server, "k-new").status_code == 401
    reload(server, file, "{name: some, key: k-new, requests_per_minute: 1}")
    assert [ask(server, "k-new").status_code for _ in range(2)] == [200, 429]


def test_a_reload_counts_what_runs(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file), "--max-num-seqs", "1", "--scheduling-policy", "priority")
    few = "name: few, key: k-few"
    reload(server, file, f"{{{few}, max_concurrent: 64}}")
    long = {"model": "alpha", "prompt": [PROMPT] * 64, "max_tokens": 480, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer k-few"}
    with server.client.stream("POST", "/v1/completions", json=long, headers=headers) as running:
        assert running.status_code == 200
        for most, status in ((64, 429), (65, 200), (2, 429)):
            reload(server, file, f"{{{few}, max_concurrent: {most}}}")
            answer = ask(server, "k-few", max_tokens=1, priority=-1)
            assert answer.status_code == status, (most, answer.text)
        assert ask(server, "k-few", n=3, temperature=1).status_code == 400
    deadline = time.monotonic() + 20
    while (status := ask(server, "k-few", max_tokens=1).status_code) == 429 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert status == 200


def test_weights_without_effect_are_warned_of_and_a_reload_goes_on(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file), "--scheduling-policy", "fcfs")
    assert "weights of keys have no effect" in server.log
    write(file, "{name: all, key: k-all, weight: 1}")
    server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while ask(server, "k-one", "alpha").status_code != 401 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(server, "k-all").status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        "- {name: a, key: sk-TOPSECRET, adapters: [x}",
        "- {name: a, key: 31337424242}",
        "- {name: a, key: [sk-TOPSECRET]}",
    ],
)
def test_errors_do_not_show_keys(start_server: StartServer, tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    server = start_server("--keys-file", str(path))
    assert server.process.wait(30) == 2
    assert "the keys file" in server.log
    assert "TOPSECRET" not in server.log
    assert "31337424242" not in server.log


def test_keys_change_while_the_server_runs(start_server: StartServer, file: Path) -> None:
    server = start_server(*MODULES, "--keys-file", str(file))
    write(file, "{name: all, key: k-new}")
    server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while ask(server, "k-new").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(server, "k-new").status_code == 200
    assert ask(server, "k-all").status_code == ask(server, "k-one").status_code == 401
    write(file, "{name: all, key: k-other, adaptors: []}")
    server.process.send_signal(signal.SIGHUP)
    while "not taken" not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "adaptors" in server.log
    assert ask(server, "k-new").status_code == 200


def test_reading_many_keys_holds_nobody_up(start_server: StartServer, file: Path) -> None:
    server = start_server("--keys-file", str(file))
    write(file, *(f"{{name: user-{number}, key: k-{number}, weight: 2}}" for number in range(20_000)))
    refused: list[int] = []

    def is_taken() -> bool:
        # A connection of its own: those are what nobody took any more.
        headers = {"Authorization": "Bearer k-19999"}
        status = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).status_code
        refused.append(status)
        return status == 200

    reload_until(server, is_taken, 60)
    # Those were answered while it read.
    assert refused.count(401) > 5
    assert ids(server, "k-7") == ["base"]
    assert server.stop() == 0


def test_a_keys_file_that_never_ends_does_not_keep_a_server(start_server: StartServer, file: Path) -> None:
    server = start_server("--keys-file", str(file))
    file.unlink()
    os.mkfifo(file)
    server.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert ask(server, "k-all").status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.stop() == 0


def test_keys_that_change_while_the_model_loads_are_taken(
    start_server: StartServer, file: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    template = tmp_path / "template.jinja"
    # The start waits for what is in it.
    os.mkfifo(template)

    def change() -> None:
        status = 0
        while status != 503:
            try:
                status = httpx.get(f"http://127.0.0.1:{port}/health").status_code
            except httpx.TransportError:
                time.sleep(0.02)
        write(file, "{name: all, key: k-new}")
        found = subprocess.run(["pgrep", "-f", f"serve.*--port {port}"], capture_output=True, text=True, check=True)
        os.kill(int(found.stdout), signal.SIGHUP)
        template.write_text("{{ messages[0]['content'] }}")

    thread = threading.Thread(target=change)
    thread.start()
    server = start_server("--port", str(port), "--chat-template", str(template), "--keys-file", str(file))
    thread.join()
    deadline = time.monotonic() + 20
    while ask(server, "k-new").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [ask(server, key).status_code for key in ("k-new", "k-all")] == [200, 401]


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["{name: a, key: k}", "{name: b, key: k}"], "another's"),
        (["{name: a, key: k}", "{name: a, key: l}"], "two keys"),
        (["{name: a}"], "`key`"),
        (["{name: a, key: k, max_concurrent: 0}"], "max_concurrent"),
    ],
)
def test_wrong_keys_abort_the_start(start_server: StartServer, tmp_path: Path, entries: list[str], told: str) -> None:
    path = tmp_path / "keys.yaml"
    write(path, *entries)
    server = start_server("--keys-file", str(path))
    assert server.process.wait(30) == 2
    assert told in server.log
