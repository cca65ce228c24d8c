"""What is wrong with a request is said with its place, and hurts nobody else."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from .conftest import PROMPT, Server, StartServer

JSON = {"Content-Type": "application/json"}


def raw(server: Server, body: bytes, **headers: str) -> Any:
    return server.client.post("/v1/completions", content=body, headers=JSON | headers)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"model": "base", # a comment\n "prompt": "x"}', ["line 1, column 19", "# a comment", "no comments"]),
        (b'{"model": "base",\n  // a comment\n "prompt": "x"}', ["line 2, column 3", "// a comment", "no comments"]),
        (b'{"model": "base",\n "prompt": }', ["line 2, column 12", "near `}`"]),
        (b'{"model": "base"', ["line 1"]),
        (b"", ["line 1"]),
        (b"[1, 2]", ["JSON object"]),
        (b'{"prompt": "\xff"}', ["line 1"]),
        (b"[" * 5000, ["recursion limit"]),
    ],
)
def test_what_is_not_json_is_told_with_its_place(server: Server, body: bytes, told: list[str]) -> None:
    answer = raw(server, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_regex"),
        ({"model": 3}, "model"),
        ({"lora_scale": "strong"}, "lora_scale"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_wrong_fields_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.complete("alpha", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt": [100000]}, "out of vocabulary"),
        ({"prompt": [5] * 600}, "max_model_len"),
        ({"prompt": ""}, "empty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_wrong_values_are_explained(server: Server, fields: dict[str, Any], told: str) -> None:
    answer = server.complete("base", **fields)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


def test_unknown_fields_pass(server: Server) -> None:
    assert server.text("alpha", user="me", something_new={"a": 1}, truncate_prompt_tokens=None) == server.text("alpha")


def test_only_json_is_taken(server: Server) -> None:
    answer = server.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "Only 'application/json' is allowed" in answer.json()["error"]["message"]


def test_methods_and_paths_that_are_not_there(server: Server) -> None:
    answer = server.client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == 405
    assert server.client.get("/v1").status_code == 404


def test_large_bodies_are_refused_and_the_server_lives(server: Server) -> None:
    answer = raw(server, b'{"prompt": "' + b"x" * (40 << 20) + b'"}')
    assert answer.status_code == 413
    assert "33554432" in answer.json()["error"]["message"]
    assert server.complete().status_code == 200


def test_slow_and_broken_clients_hold_nobody_up(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    stuck = [socket.create_connection((host, int(port))) for _ in range(50)]
    for number, connection in enumerate(stuck):
        connection.sendall(
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"\x00\xff garbage\r\n\r\n", b"")[number % 3]
        )
    assert server.complete().status_code == 200
    for connection in stuck:
        connection.close()
    assert server.complete().status_code == 200


def test_one_disconnect_frees_its_rows(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"model": "alpha", "prompt": [5, 6], "max_tokens": 480, "ignore_eos": true, "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + body)
    assert b"200 OK" in connection.recv(1000)
    connection.close()
    deadline = time.monotonic() + 10
    while server.client.get("/load").json()["server_load"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.client.get("/load").json()["server_load"] == 0


def test_too_many_are_sent_away_for_a_moment(start_server: StartServer) -> None:
    server = start_server("--max-pending", "2")
    # More than may wait, but alone it may run: it takes long beside what asking again takes.
    long = {"prompt": [PROMPT] * 48, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=long) as running:
        assert running.status_code == 200, running.read()
        answer = server.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "max_pending" in answer.json()["error"]["message"]
        running.read()
    assert server.complete().status_code == 200
