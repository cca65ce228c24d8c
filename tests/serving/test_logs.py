"""What the server logs: its start, its work every few seconds, each request where that is asked for; never prompts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from .conftest import Server, StartServer

SECRET = "the prompt's own words"
EVERY = {"MANYLORA_LOG_STATS_INTERVAL": "0.2"}


def lines_with(server: Server, words: str, count: int = 1) -> list[str]:
    """Wait until as many lines have the words."""
    for _ in range(400):
        found = [line for line in list(server.lines) if words in line]
        if len(found) >= count:
            return found
        time.sleep(0.05)
    pytest.fail(f"no line has {words!r}: {server.log}")


def told(server: Server, message: str, count: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_with(server, f'"message":"{message}"', count)]


def test_each_request_is_told_where_that_is_asked_for(start_server: StartServer) -> None:
    server = start_server("--lora-modules", "alpha=alpha", "--enable-log-requests", "--log-format", "json", **EVERY)
    answer = server.client.post(
        "/v1/completions",
        json={
            "model": "alpha",
            "prompt": SECRET,
            "max_tokens": 5,
            "n": 2,
            "ignore_eos": True,
            "temperature": 1,
            "seed": 1,
        },
        headers={"X-Request-Id": "mine-1"},
    )
    assert answer.status_code == 200, answer.text
    (line,) = told(server, "request")
    version = server.client.get("/v1/models/alpha").json()["version"]
    usage = answer.json()["usage"]
    assert {name: line[name] for name in line if name not in ("timestamp", "time_to_first_token", "seconds")} == {
        "level": "INFO", "message": "request", "target": "manylora_server::metrics::account", "request_id": "mine-1",
        "answer_id": answer.json()["id"], "model": "alpha", "adapter_version": version, "samples": 2,
        "prompt_tokens": usage["prompt_tokens"], "generation_tokens": 10, "finish_reason": "length",
    }  # fmt: skip
    assert 0 < line["time_to_first_token"] <= line["seconds"]
    # One that has no id of its own gets one, which the answer has too; one that is refused is not told of.
    assert server.complete("nobody").status_code == 404
    given = server.complete().headers["x-request-id"]
    base = told(server, "request", 2)[1]
    assert (base["request_id"], base["answer_id"], base["model"]) == (given, f"cmpl-{given}", "base")
    # One whose body has an id is found by it, too.
    assert server.complete(request_id="of-body").json()["id"] == "cmpl-of-body"
    own = told(server, "request", 3)[2]
    assert own["answer_id"] == "cmpl-of-body"
    assert own["request_id"] != "of-body"
    assert "adapter_version" not in base
    assert SECRET not in server.log
    # Every line is JSON, Python's too.
    for text in list(server.lines):
        assert json.loads(text)["message"], text


def test_a_stream_that_is_left_is_told_as_aborted(start_server: StartServer) -> None:
    # One after the other, so that it takes many times as long as leaving does.
    server = start_server("--enable-log-requests", "--log-format", "json", "--max-num-seqs", "1")
    prompts, most = 256, 480
    body = {"prompt": [[5, 6]] * prompts, "max_tokens": most, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "left"}) as answer:
        next(answer.iter_lines())
    (line,) = told(server, "request")
    assert (line["request_id"], line["samples"], line["prompt_tokens"]) == ("left", prompts, 2 * prompts)
    assert line["finish_reason"] == "abort"
    assert 0 <= line["generation_tokens"] < prompts * most / 2
    # The next one ended by itself, and is told so.
    assert server.complete().status_code == 200
    assert [line["finish_reason"] for line in told(server, "request", 2)] == ["abort", "length"]


def test_the_engines_work_is_told_while_there_is_some(start_server: StartServer) -> None:
    server = start_server("--lora-modules", "alpha=alpha", "--log-format", "json", **EVERY)
    server.complete("alpha", max_tokens=8)
    line = told(server, "engine")[-1]
    assert (line["registered"], line["resident_host"], line["resident_device"]) == (1, 1, 0)
    assert line["generation_tokens_per_second"] > 0
    # Nothing happens, nothing is told; then something does.
    before = len(told(server, "engine"))
    time.sleep(1)
    quiet = len(told(server, "engine")) - before
    assert quiet <= 1
    server.complete("alpha", max_tokens=8)
    told(server, "engine", before + quiet + 1)
    # No request is told of unless that is asked for.
    assert '"message":"request"' not in server.log


def test_the_line_can_be_turned_off_and_the_rank_is_said_to_reserve_nothing(start_server: StartServer) -> None:
    server = start_server("--lora-modules", "alpha=alpha", "beta=beta", "--disable-log-stats", **EVERY)
    assert "max_lora_rank=64: a limit, reserves 0 B; highest registered rank 8" in server.log
    server.complete("alpha")
    time.sleep(1)
    assert "generation_tokens_per_second" not in server.log
    assert not re.search(r"^\S+Z +INFO", server.log, re.MULTILINE)


@pytest.mark.parametrize(("level", "count"), [("info", 1), ("warning", 1), ("error", 0)])
def test_a_level_silences_what_is_below(level: str, count: int) -> None:
    """A warning about a flag without effect, then the error that ends the start."""
    flags = ["/nowhere", "--port", "0", "--uvicorn-log-level", "debug", "--log-level", level]
    ended = subprocess.run(
        [sys.executable, "-m", "manylora", "serve", *flags], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.count("has no effect") == count
    assert ended.stderr.count("manylora: error:") == 1


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan"])
def test_an_interval_that_is_none_is_refused(start_server: StartServer, given: str) -> None:
    server = start_server(MANYLORA_LOG_STATS_INTERVAL=given)
    assert server.process.wait(20) == 2
    assert f"MANYLORA_LOG_STATS_INTERVAL must be seconds above 0, got `{given}`" in server.log
