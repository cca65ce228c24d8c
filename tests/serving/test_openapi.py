"""The server does what its OpenAPI document says, whatever is sent to it; and who may go where."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from .conftest import ADAPTERS, ORACLE, PROMPT, Server, StartServer, server_flags

DOCUMENT = ORACLE.parent.parent / "crates" / "manylora-server" / "src" / "openapi.json"
ON = {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"}
GOOD = re.compile(r'http_requests_total\{handler="[^"]*",method="POST",status="2xx"\} \S+')
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def described() -> Iterator[Server]:
    """A server with an adapter, all of whose routes are open to the admin key."""
    modules = ("--lora-modules", f"alpha={ADAPTERS / 'alpha'}", f"x={ADAPTERS / 'alpha'}")
    server = Server(server_flags("--admin-api-key", "admin", "--max-model-len", "64", *modules), ADAPTERS, ON)
    yield server
    server.close()


anything = schemathesis.openapi.from_path(DOCUMENT)
well_formed = schemathesis.openapi.from_path(
    DOCUMENT,
    config=schemathesis.Config.from_dict(
        {"generation": {"mode": "positive"}, "phases": {"coverage": {"enabled": False}}}
    ),
)
# What only those can fill in well who know the base.
OF_THE_BASE = (
    "logit_bias", "allowed_token_ids", "stop_token_ids", "best_of", "chat_template", "adapter_id", "lora_name",
    "lora_path", "lora", "priority",
)  # fmt: skip


@well_formed.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Make a body one that can be served: of the right form it is already."""
    path = context.operation.path
    if path.endswith("_adapter"):
        # One comes and goes, the other stays.
        body["lora_name"] = "x" if "unload" in path else "alpha"
        if "unload" not in path and "pin" not in path:
            body |= {"lora_name": "x" if len(repr(body)) % 2 else "alpha", "lora_path": "alpha"}
            body.pop("expected_version", None)
        return body
    for name in OF_THE_BASE:
        body.pop(name, None)
    body["model"] = "base" if body.get("lora_scale") is None else "alpha"
    body |= {"n": (body.get("n") or 1) % 3 + 1, "temperature": 0.5, "max_tokens": 4, "min_tokens": 0}
    for name in ("prompt_logprobs", "top_logprobs"):
        body.pop(name, None)
    if path == "/v1/completions":
        body["logprobs"] = 2
    for name in ("prompt", "tokens"):
        if name in body:
            body[name] = known(body[name])
    return body


def known(value: Any) -> Any:
    """Token ids that there are, and no more of anything than there is room for."""
    if isinstance(value, list):
        return [known(item) for item in value[:3]]
    if isinstance(value, int) and not isinstance(value, bool):
        return value % 200 + 5
    return value[:20] or "x" if isinstance(value, str) else value


def ask(case: schemathesis.Case, server: Server) -> int:
    """Send a case and compare the answer with the document; return its status."""
    answer = case.call(base_url=server.url, headers={"Authorization": "Bearer admin"}, timeout=30)
    case.validate_response(answer, checks=CHECKS)
    return int(answer.status_code)


@anything.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_sent_the_answer_is_one_that_is_described(case: schemathesis.Case, described: Server) -> None:
    ask(case, described)


@well_formed.include(method="POST").parametrize()
@settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_what_can_be_served_is_answered_as_described(case: schemathesis.Case, described: Server) -> None:
    if case.path == "/v1/unload_lora_adapter":
        load = {"lora_name": "x", "lora_path": "alpha"}
        assert described.post("/v1/load_lora_adapter", load, Authorization="Bearer admin").status_code == 200
    ask(case, described)


def test_the_server_has_outlived_it(described: Server) -> None:
    page = described.client.get("/metrics").text
    served = {line.split('"')[1]: float(line.split()[-1]) for line in page.splitlines() if GOOD.fullmatch(line)}
    routes = ("completions", "chat/completions", "load_lora_adapter", "unload_lora_adapter", "pin_lora_adapter")
    assert all(served.get(f"/v1/{route}", 0) >= 8 for route in routes), served
    # What was tested is what the server says.
    assert described.client.get("/openapi.json").json()["paths"] == json.loads(DOCUMENT.read_text())["paths"]
    assert described.complete("base").status_code == 200
    assert described.client.get("/load").json()["server_load"] == 0


def operations(server: Server, key: str) -> list[tuple[str, str]]:
    """Methods and paths that need a key of that kind."""
    paths = server.client.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.replace("{name}", "alpha"))
        for path, methods in paths.items()
        for method, operation in methods.items()
        if {key: []} in operation.get("security", [])
    ]


KEYS_FILE = "keys: [{name: one, key: user}]"


@pytest.mark.parametrize(
    "flags",
    [
        ["--admin-api-key", "secret"],
        ["--api-key", "user"],
        ["--api-key", "user", "--admin-api-key", "secret"],
        ["--keys-file", KEYS_FILE],
        ["--host", "0.0.0.0"],
        ["--host", "0.0.0.0", "--admin-api-key", "secret"],
        ["--host", "::", "--api-key", "user"],
        ["--host", "localhost", "--keys-file", KEYS_FILE, "--admin-api-key", "secret"],
    ],
    ids=" ".join,
)
def test_a_48_every_route_is_closed_without_its_key(
    start_server: StartServer, flags: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS_FILE)
    given = [str(file) if flag == KEYS_FILE else flag for flag in flags]
    server = start_server(*given, "--lora-modules", f"alpha={ADAPTERS / 'alpha'}", **ON)
    server.client.base_url = server.url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")
    made = "--admin-api-key" not in flags
    assert made == ("Authorization: Bearer mlr-" in server.log)
    admin = server.log.split("Authorization: Bearer ")[1].split("'")[0] if made else "secret"
    has_users = "--api-key" in flags or "--keys-file" in flags
    managing, using = operations(server, "admin"), operations(server, "user")
    assert {path for _, path in managing} >= {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/pin_lora_adapter",
    }
    assert ("POST", "/v1/chat/completions") in using
    # Nothing that changes anything is described as open.
    everything = server.client.get("/openapi.json").json()["paths"]
    open_posts = {path for path, methods in everything.items() if "post" in methods} - {
        path for _, path in managing + using
    }
    assert open_posts == {"/ping"}

    body = {"lora_name": "alpha", "lora_path": "beta", "load_inplace": True, "prompt": PROMPT, "tokens": [1]}
    ids = server.client.get("/v1/models", headers={"Authorization": "Bearer user"}).json()["data"]
    wrong = [
        None,
        "Bearer wrong",
        "Bearer",
        "Basic secret",
        "secret",
        f"Basic {admin}",
        admin,
        "Bearer user",
    ]
    for authorization in wrong:
        headers = {"Authorization": authorization} if authorization else {}
        for method, path in managing:
            for local in ({}, {"Host": "localhost"}, {"Origin": "http://localhost"}):
                answer = server.client.request(method, path, json=body, headers=headers | local)
                assert answer.status_code == 401, (method, path, authorization)
            # Nor by another method, or in another spelling.
            assert server.client.put(path, json=body, headers=headers).status_code == 401
            assert server.client.post(path + "/", json=body, headers=headers).status_code == 404
            assert server.client.post(path.upper(), json=body, headers=headers).status_code == 404
    after = server.client.get("/v1/models", headers={"Authorization": "Bearer user"}).json()["data"]
    assert [(it["id"], it.get("version")) for it in after] == [(it["id"], it.get("version")) for it in ids]
    for method, path in using:
        for authorization in (f"Bearer {admin}", "Bearer wrong", "Basic user", ""):
            answer = server.client.request(method, path, json=body, headers={"Authorization": authorization})
            assert (answer.status_code == 401) == has_users, (method, path, authorization)
    right = {"Authorization": f"Bearer {admin}"}
    assert server.client.post("/v1/load_lora_adapter", json=body, headers=right).status_code == 200


def test_a_48_without_management_its_routes_are_not_there(server: Server) -> None:
    managing = operations(server, "admin")
    assert managing
    for method, path in managing:
        answer = server.client.request(method, path, json={"lora_name": "alpha", "lora_path": "alpha"})
        assert answer.status_code == 404, path
    assert server.ids() == ["base", "alpha", "beta"]


def test_the_document_can_be_left_out(start_server: StartServer) -> None:
    server = start_server("--disable-fastapi-docs")
    assert server.client.get("/openapi.json").status_code == 404
    assert server.client.get("/health").status_code == 200
