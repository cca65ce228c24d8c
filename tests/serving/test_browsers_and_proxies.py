"""Pages of other origins, and a proxy that serves the server under a path."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest

from manylora.cli import main

from .conftest import ADAPTERS, PROMPT, Server, StartServer, server_flags
from .test_management import ROUTES

PAGE = "https://page.example"
ROOT = "/models/one"


def ask_first(server: Server, path: str, origin: str, method: str = "POST", **more: str) -> httpx.Response:
    """What a browser sends before it lets a page of another origin do something."""
    asked = {"Origin": origin, "Access-Control-Request-Method": method, **more}
    return server.client.options(path, headers=asked)


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    """A server under a path, with an origin that may use it, that can be managed from this machine."""
    flags = server_flags(
        "--allowed-origins", f'["{PAGE}", "http://localhost:3000"]', "--root-path", ROOT + "/", "--api-key", "user",
        "--admin-api-key", "admin",
    )  # fmt: skip
    server = Server(flags, ADAPTERS, {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    yield server
    server.close()


def test_pages_of_an_allowed_origin_may_use_the_api(open_server: Server) -> None:
    headers = {"Access-Control-Request-Headers": "authorization,content-type"}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", ROOT + "/v1/completions"):
        asked = ask_first(open_server, path, PAGE, **headers)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-credentials" not in asked.headers
    body = {"prompt": PROMPT, "max_tokens": 1}
    answer = open_server.post("/v1/completions", body, Origin=PAGE, Authorization="Bearer user")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "origin" in answer.headers["vary"]
    # A page learns what is wrong, too.
    refused = open_server.post("/v1/completions", body, Origin=PAGE)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_pages_of_other_origins_get_no_permission(open_server: Server, server: Server) -> None:
    for asked in (
        ask_first(open_server, "/v1/completions", "https://evil.example"),
        ask_first(open_server, "/v1/completions", "null"),
        # Nothing is allowed unless somebody allows it.
        ask_first(server, "/v1/completions", PAGE),
        ask_first(server, "/v1/completions", "http://localhost:3000"),
        server.client.get("/v1/models", headers={"Origin": PAGE}),
    ):
        assert "access-control-allow-origin" not in asked.headers


def test_a_48_no_page_manages_whatever_origins_are_allowed(open_server: Server, start_server: StartServer) -> None:
    local = start_server("--allowed-origins", "*", "--allowed-headers", "*", MANYLORA_ALLOW_RUNTIME_LORA_UPDATING="1")
    assert ask_first(local, "/v1/completions", PAGE).headers["access-control-allow-origin"] == "*"
    for route in ROUTES:
        for server, origin in ((open_server, PAGE), (open_server, "http://localhost:3000"), (local, PAGE)):
            asked = ask_first(server, route, origin)
            assert asked.status_code in (401, 405)
            assert "access-control-allow-origin" not in asked.headers
        body = {"lora_name": "alpha", "lora_path": "alpha"}
        answer = local.post(route, body, Origin=PAGE)
        assert answer.status_code == 401
        assert PAGE in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert local.load("alpha", "alpha").status_code == 200


def test_methods_and_headers_can_be_named(start_server: StartServer) -> None:
    flags = ("--allowed-origins", PAGE, "--allowed-methods", "GET", "--allowed-headers", "X-One", "--allow-credentials")
    asked = ask_first(start_server(*flags), "/v1/models", PAGE)
    assert asked.headers["access-control-allow-methods"] == "GET"
    assert asked.headers["access-control-allow-headers"] == "x-one"
    assert asked.headers["access-control-allow-credentials"] == "true"


def test_routes_are_found_with_and_without_the_path(open_server: Server) -> None:
    key = {"Authorization": "Bearer user"}
    for prefix in ("", ROOT):
        assert open_server.client.get(prefix + "/health").status_code == 200
        assert open_server.client.get(prefix + "/v1/models/base", headers=key).json()["id"] == "base"
        missing = open_server.client.get(prefix + "/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"].endswith("there is no GET /nothing")
        # Who may do what does not depend on it.
        assert open_server.client.get(prefix + "/v1/models").status_code == 401
        for route in ROUTES:
            assert open_server.post(prefix + route, {"lora_name": "x"}, **key).status_code == 401
    assert open_server.client.get(ROOT).headers["content-type"] == "text/html; charset=utf-8"
    for path in (ROOT + "er/health", ROOT + ROOT + "/health", "/models/health"):
        assert open_server.client.get(path).status_code == 404, path
    assert open_server.client.get("/openapi.json").json()["servers"] == [{"url": ROOT}]
    # What is counted by route is counted under the route.
    page = open_server.client.get(ROOT + "/metrics").text
    assert 'handler="/v1/models/{*name}"' in page
    assert ROOT not in page


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--root-path", "models"), "must be a path"),
        (("--root-path", "/v1"), "is where /v1/models is"),
        (("--allowed-origins", "page.example"), "`page.example` is no origin"),
        (("--allowed-origins", '["https://page.example"'), "is not a JSON list"),
        (("--allowed-origins", "[1]"), "must be a JSON list of strings"),
        (("--allowed-methods", "GET"), "give --allowed-origins too"),
        (("--allowed-origins", "*", "--allow-credentials"), "name the origins"),
        (("--admin-api-key", "k", "--api-key", "k"), "two keys"),
    ],
)
def test_what_cannot_be_is_told_before_a_base_is_looked_for(
    flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/nowhere/at-all", "--port", "0", *flags]) == 2
    assert told in capsys.readouterr().err
