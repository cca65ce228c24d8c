"""The server does what its OpenAPI document says, whatever is sent to it; and who may go where."""

from __future__ import annotations

import json
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

from .conftest import ADAPTERS, ORACLE, PROMPT, Server, StartServer, _flags

DOCUMENT = ORACLE.parent.parent / "crates" / "manylora-server" / "src" / "openapi.json"
ON = {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"}
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
    modules = ("--lora-modules", f"alpha={ADAPTERS / 'alpha'}")
    server = Server(_flags("--admin-api-key", "admin", "--max-model-len", "64", *modules), ADAPTERS, ON)
    yield server
    server.close()


schema = schemathesis.openapi.from_path(DOCUMENT)


@schema.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Names that exist, where made up ones would lead nowhere: most of the time, and the same for the same body."""
    if isinstance(body, dict):
        chosen = len(repr(body)) % 4
        if "model" in body and chosen:
            body["model"] = ("base", "alpha", None)[chosen - 1]
        if "lora_name" in body and context.operation.path.startswith("/v1/") and chosen:
            body["lora_name"] = "alpha"
        if "lora_path" in body and chosen:
            body["lora_path"] = "alpha"
        for selector in ("adapter_id", "lora", "lora_scale"):
            if chosen != 1 and selector in body:
                del body[selector]
    return body


@schema.parametrize()
@settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_answers_are_those_that_are_described(case: schemathesis.Case, described: Server) -> None:
    answer = case.call(base_url=described.url, headers={"Authorization": "Bearer admin"}, timeout=30)
    case.validate_response(answer, checks=CHECKS)


def test_the_server_has_outlived_it(described: Server) -> None:
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
