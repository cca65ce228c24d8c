"""Completions and chat: names, shapes, streams."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import PROMPT, Server, events

MESSAGES = [{"role": "user", "content": "hello"}]

VERSION = "x-manylora-adapter-version"


def test_each_name_has_its_own_answer(server: Server) -> None:
    texts = {name: server.text(name) for name in ("base", "alpha", "beta")}
    assert len(set(texts.values())) == 3
    # In one batch, in any company, the same.
    assert {name: server.text(name) for name in ("beta", "alpha", "base")} == texts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
@pytest.mark.parametrize("name", ["nope", "", "Alpha", "alpha "])
def test_a_44_unknown_names_are_404_before_any_byte(server: Server, path: str, body: Any, name: str) -> None:
    answer = server.post(path, body | {"model": name})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert error["message"] == f"The model `{name}` does not exist. Valid aliases: base."


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank", "/nowhere"])
def test_a_44_what_is_not_offered_answers_in_the_same_envelope(server: Server, path: str) -> None:
    answer = server.post(path, {"model": "alpha", "input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404


def test_no_model_is_the_base(server: Server) -> None:
    assert server.complete(None).json()["model"] == "base"
    assert server.complete(None, model=None).json()["choices"] == server.complete().json()["choices"]


def test_a_45_answers_and_chunks_echo_the_name(server: Server) -> None:
    assert server.complete("alpha").json()["model"] == "alpha"
    body = {"model": "alpha", "messages": MESSAGES, "max_tokens": 4}
    assert server.post("/v1/chat/completions", body).json()["model"] == "alpha"
    chunks = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    assert chunks[-1] is None
    assert {chunk["model"] for chunk in chunks[:-1]} == {"alpha"}


def test_a_45_models_are_listed_with_their_lineage(server: Server) -> None:
    base, alpha, beta = server.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("base", None, 512)
    assert (alpha["id"], beta["id"]) == ("alpha", "beta")
    assert alpha["parent"] == "base"
    assert alpha["root"].endswith("/alpha")
    assert server.client.get("/v1/models/alpha").json()["id"] == "alpha"
    assert server.client.get("/v1/models/nope").status_code == 404


@pytest.mark.parametrize("model", ["base", "alpha"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_57_a_stream_adds_up_to_the_answer(server: Server, model: str, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    body = {
        "model": model,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True if chat else 1,
    } | prompt
    whole = server.post(path, body).json()
    streamed = server.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(streamed.text)
    assert done is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
    choice = whole["choices"][0]
    if chat:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert text == choice["message"]["content"]
        listed = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert listed == choice["logprobs"]["content"]
    else:
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        listed = [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["token_logprobs"]]
        assert listed == choice["logprobs"]["token_logprobs"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == choice["finish_reason"] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_several_prompts_and_samples_have_their_own_numbers(server: Server) -> None:
    body = {
        "prompt": ["one", "two", "three"],
        "n": 2,
        "temperature": 0.9,
        "seed": 3,
        "max_tokens": 5,
        "ignore_eos": True,
    }
    answer = server.complete("alpha", **body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["completion_tokens"] == 30
    # Each prompt alone has the same samples.
    alone = server.complete("alpha", **(body | {"prompt": "two"})).json()
    assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in answer["choices"][2:4]]
    streamed = events(server.complete("alpha", **(body | {"stream": True})).text)
    texts = [""] * 6
    for chunk in streamed[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


def test_token_ids_and_text_are_the_same_prompt(server: Server) -> None:
    tokens = server.post("/tokenize", {"prompt": "some text"}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    by_ids = server.complete("alpha", prompt=tokens["tokens"], return_token_ids=True).json()["choices"][0]
    by_text = server.complete("alpha", prompt="some text", return_token_ids=True).json()["choices"][0]
    assert by_ids["token_ids"] == by_text["token_ids"]
    assert by_text["prompt_token_ids"] == tokens["tokens"]
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    assert "some text" in text


def test_echo_begins_with_the_prompt_and_its_logprobs(server: Server) -> None:
    answer = server.complete("alpha", prompt="some text", echo=True, logprobs=2).json()
    choice = answer["choices"][0]
    assert choice["text"].startswith("some text")
    listed = choice["logprobs"]
    lengths = {len(listed[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {answer["usage"]["total_tokens"]}
    assert listed["token_logprobs"][0] is None
    assert all(value is not None for value in listed["token_logprobs"][1:])
    only = server.complete("alpha", prompt="some text", echo=True, max_tokens=0, logprobs=0).json()
    assert only["choices"][0]["text"] == "some text"
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == only["usage"]["prompt_tokens"]


def test_stop_strings_end_a_stream_as_they_end_an_answer(server: Server) -> None:
    text = server.text("alpha", max_tokens=12)
    stop = text[3:5]
    body = {"stop": [stop], "max_tokens": 12}
    whole = server.complete("alpha", **body).json()["choices"][0]
    assert whole["text"] == text[: text.index(stop)]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    chunks = events(server.complete("alpha", stream=True, **body).text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_a_53_strength_is_the_requests_own(server: Server) -> None:
    base, whole = server.text("base"), server.text("alpha")
    assert server.text("alpha", lora_scale=0) == base
    assert server.text("alpha", lora_scale=1) == whole
    assert server.text("base", lora=[]) == base
    assert server.text("base", lora=[{"id": "alpha", "scale": 1}]) == whole
    assert server.text("base", lora=[{"id": "alpha", "scale": 0}]) == base
    assert server.complete("base", lora_scale=0.5).status_code == 400


def test_selectors_of_other_servers_are_honoured_or_refused(server: Server) -> None:
    whole = server.text("alpha")
    for fields in ({"adapter_id": "alpha"}, {"lora_path": "alpha"}, {"model": "base:alpha"}):
        answer = server.complete("base", **fields).json()
        assert answer["choices"][0]["text"] == whole, fields
    for fields, status in (
        ({"adapter_id": "nope"}, 404),
        ({"lora": [{"id": 0, "scale": 1.0}]}, 400),
        ({"model": "beta", "adapter_id": "alpha"}, 400),
        ({"model": "base:nope"}, 404),
    ):
        answer = server.complete("base", **fields)
        assert answer.status_code == status, answer.text


def test_the_version_that_served_is_told(server: Server) -> None:
    answer = server.complete("alpha")
    version = answer.headers["x-manylora-adapter-version"]
    assert version == server.client.get("/v1/models/alpha").json()["version"]
    assert "x-manylora-adapter-version" not in server.complete("base").headers
    assert server.complete("alpha", stream=True).headers["x-manylora-adapter-version"] == version
    # All of them, in the request's order.
    beta = server.client.get("/v1/models/beta").json()["version"] or server.complete("beta").headers[VERSION]
    for names, expected in ((("beta", "alpha"), f"{beta}, {version}"), (("alpha", "beta"), f"{version}, {beta}")):
        answer = server.complete("base", lora=[{"id": name} for name in names], prompt=[PROMPT, PROMPT[:3]])
        assert answer.headers[VERSION] == expected
    # What has no strength serves nothing.
    mixed = server.complete("base", lora=[{"id": "beta", "scale": 0}, {"id": "alpha"}])
    assert mixed.headers[VERSION].endswith(version)


def test_prompt_logprobs_have_records_by_token(server: Server) -> None:
    listed = server.complete("alpha", prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert listed[0] is None
    assert len(listed) == len(PROMPT)
    for token, records in zip(PROMPT[1:], listed[1:], strict=True):
        assert set(records[str(token)]) == {"logprob", "rank", "decoded_token"}


def test_chat_logprobs_have_bytes_and_ranked_company(server: Server) -> None:
    body = {
        "model": "alpha",
        "messages": MESSAGES,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
        "temperature": 0,
    }
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    for one in content:
        assert len(one["top_logprobs"]) == 3
        ranked = [other["logprob"] for other in one["top_logprobs"]]
        assert ranked == sorted(ranked, reverse=True)
        # Greedy: the first is the chosen one.
        assert one["top_logprobs"][0]["bytes"] == one["bytes"]
    assert server.post("/v1/chat/completions", body | {"logprobs": False}).status_code == 400


def test_request_ids_come_back(server: Server) -> None:
    request = {"model": "base", "prompt": PROMPT, "max_tokens": 1}
    assert server.post("/v1/completions", request, **{"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert len(server.complete().headers["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_the_ids_of_their_requests(server: Server, stream: bool) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPT}
    messages: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for path, begins, body in (
        ("/v1/completions", "cmpl-", prompt), ("/v1/chat/completions", "chatcmpl-", messages),
    ):  # fmt: skip
        body = body | {"max_tokens": 2, "stream": stream}

        def said(body: dict[str, Any], path: str = path, **headers: str) -> tuple[str, str]:
            answer = server.post(path, body, **headers)
            assert answer.status_code == 200, answer.text
            parts = [part for part in events(answer.text) if part] if stream else [answer.json()]
            assert len({part["id"] for part in parts}) == 1
            return str(parts[0]["id"]), answer.headers["x-request-id"]

        # The header's, as in vLLM, then the body's, then the one that the request is given here.
        assert said(body | {"request_id": "other"}, **{"X-Request-Id": "mine"}) == (begins + "mine", "mine")
        assert said(body | {"request_id": "other"})[0] == begins + "other"
        made, header = said(body)
        assert made == begins + header
        long = server.post(path, body | {"request_id": "x" * 257})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "request_id")


def test_the_server_says_how_it_is(server: Server) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 200
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/load").json() == {"server_load": 0}
