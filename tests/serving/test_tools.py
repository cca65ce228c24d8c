"""Tools and reasoning over HTTP: a tiny model, whose words a grammar or a bias puts into its mouth."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import ADAPTERS, ORACLE, Server, StartServer

THINK, END_THINK = 288, 289
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """\
{% if tools %}{% for tool in tools %}{{ tool.function.name | tojson }}{% endfor %} in <tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinks is defined %}<think>
{% if not thinks %}
</think>

{% endif %}{% endif %}{% endif %}"""
LLAMA_TEMPLATE = (
    """{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of them}\n{% endif %}"""
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"
)


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", days={"type": "integer", "minimum": 1, "maximum": 7}, unit={"$ref": "#/$defs/unit"}),
    tool("stop", now={"type": "boolean"}),
]
TOOLS[0]["function"]["parameters"]["$defs"] = {"unit": {"enum": ["C", "F"]}}
USER: list[Any] = [{"role": "user", "content": "hi"}]
SAID = (
    'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"days": 2, "unit": "C"}}\n</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {"now": true}}</tool_call>'
)


def assert_follows(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert set(given) == {"days", "unit"}
        assert 1 <= given["days"] <= 7
        assert given["unit"] in ("C", "F")
    else:
        assert name == "stop"
        assert set(given) == {"now"}
        assert isinstance(given["now"], bool)


def base_with_marks(folder: Path, *, special: bool = False) -> Path:
    """A base whose tokenizer knows the marks of reasoning and calls: it has rows to spare."""
    base = folder / "base"
    shutil.copytree(ORACLE / "qwen2-padded" / "base", base)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [
        like | {"id": THINK + index, "content": mark, "special": special} for index, mark in enumerate(MARKS)
    ]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    return base


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hermes")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    server = Server(
        [
            str(base_with_marks(folder)), "--device", "cpu", "--dtype", "float32", "--port", "0",
            "--served-model-name", "base", "--kv-cache-memory-bytes", str(32 << 20), "--chat-template", str(template),
            "--reasoning-parser", "qwen3", "--enable-auto-tool-choice",
        ],
        ADAPTERS,
        {},
    )  # fmt: skip
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(hermes: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"model": "base", "messages": USER, "max_tokens": 250, "temperature": 0}
    return client.chat.completions.create(**(defaults | fields))


def say(text: str, **fields: Any) -> dict[str, Any]:
    """What makes the model say a text, whatever it would say."""
    closed = {"chat_template_kwargs": {"thinks": False}}
    return fields | {"extra_body": {"structured_outputs": {"choice": [text]}} | closed}


def gathered(stream: Any) -> tuple[str, list[dict[str, str]], str, list[Any]]:
    """Content, calls and finish reason of a stream, put together by hand; and its deltas."""
    content, calls, finish, deltas = "", [], "", []
    for chunk in stream:
        choice = chunk.choices[0]
        deltas.append(choice.delta)
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                assert part.type == "function"
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            calls[part.index]["arguments"] += part.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, calls, finish, deltas


def test_calls_are_found_in_what_the_model_says(client: openai.OpenAI) -> None:
    choice = chat(client, tools=TOOLS, **say(SAID)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure."
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"days": 2, "unit": "C"}),
        ("stop", {"now": True}),
    ]
    assert all(call.type == "function" and call.id.startswith("chatcmpl-tool-") for call in calls)
    assert calls[0].id != calls[1].id
    content, streamed, finish, deltas = gathered(chat(client, tools=TOOLS, stream=True, **say(SAID)))
    assert (content, finish) == ("Sure.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in streamed] == [
        (call.function.name, call.function.arguments) for call in calls
    ]
    # The name comes alone and first, the arguments in several pieces.
    parts = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (parts[0].function.name, parts[0].function.arguments) == ("weather", "")
    assert len([part for part in parts if part.index == 0 and part.function.arguments]) > 3


def test_calls_alone_have_no_content(client: openai.OpenAI) -> None:
    one = SAID.split("\n", 1)[1]
    message = chat(client, tools=TOOLS, parallel_tool_calls=False, **say(one)).choices[0].message
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    content, calls, finish, _ = gathered(chat(client, tools=TOOLS, parallel_tool_calls=False, stream=True, **say(one)))
    assert (content, [call["name"] for call in calls], finish) == ("", ["weather"], "tool_calls")


@pytest.mark.parametrize(
    "text", ["<tool_call>weather(2)</tool_call>", '<tool_call>{"name": 3}</tool_call>', "no <tool"]
)
def test_what_is_no_call_stays_text(client: openai.OpenAI, text: str) -> None:
    choice = chat(client, tools=TOOLS, **say(text)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    content, calls, finish, _ = gathered(chat(client, tools=TOOLS, stream=True, **say(text)))
    assert (content, calls, finish) == (text, [], "stop")


def test_without_tools_or_choice_nothing_is_looked_for(client: openai.OpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = chat(client, **fields, **say(SAID)).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (SAID, None)


def test_demanded_calls_come_and_follow_their_schema(client: openai.OpenAI, hermes: Server) -> None:
    closed = {"chat_template_kwargs": {"thinks": False}}
    seen = set()
    for seed in range(6):
        fields: dict[str, Any] = {"tools": TOOLS, "seed": seed, "temperature": 1.3, "extra_body": closed}
        answer = chat(client, tool_choice="required", parallel_tool_calls=False, n=2, **fields)
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            (call,) = choice.message.tool_calls
            assert_follows(call.function.name, call.function.arguments)
            seen.add(call.function.name)
        named: Any = {"type": "function", "function": {"name": "weather"}}
        content, calls, finish, _ = gathered(chat(client, tool_choice=named, stream=True, **fields))
        assert (content, [call["name"] for call in calls], finish) == ("", ["weather"], "stop")
        assert chat(client, tool_choice=named, **fields).choices[0].finish_reason == "stop"
        assert_follows("weather", calls[0]["arguments"])
    assert seen == {"weather", "stop"}
    # Where the model does not want to end, and wastes no white space.
    blanks = [token for blank in " \t\r\n" for token in hermes.post("/tokenize", {"prompt": blank}).json()["tokens"]]
    bias = {str(token): -50.0 for token in blanks} | {"2": -100.0}
    several = chat(client, tool_choice="required", tools=TOOLS[1:], logit_bias=bias, extra_body=closed)
    calls = several.choices[0].message.tool_calls
    assert len(calls) > 1
    for call in calls:
        assert_follows("stop", call.function.arguments)


def test_calls_and_their_results_are_told_to_the_model(client: openai.OpenAI, hermes: Server) -> None:
    call = chat(client, tools=TOOLS, **say(SAID)).choices[0].message
    messages = [
        *USER,
        call.model_dump(),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "wet"},
        {"role": "tool", "tool_call_id": call.tool_calls[1].id, "content": [{"type": "text", "text": "stopped"}]},
    ]
    tokens = hermes.post("/tokenize", {"messages": messages, "tools": TOOLS[1:]}).json()["tokens"]
    prompt = hermes.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt.startswith('"stop" in <tool_call>\n')
    assert '<tool_call>\n{"name": "weather", "arguments": {"days": 2, "unit": "C"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nwet<|im_end|>\n<|im_start|>tool\nstopped<|im_end|>" in prompt
    assert chat(client, messages=messages, max_tokens=3).choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", '"required"'),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "does not match any of the specified `tools`: `other` is none of weather, stop",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "`tools[0]` must be"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "`tools[0].function.name`"),
        ({"tools": 5}, "tools", "an array"),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "give one",
        ),
        ({"tools": [tool("f", x={"type": "things"})], "tool_choice": "required"}, "tools", "things"),
    ],
)
def test_what_is_wrong_with_tools_is_told(hermes: Server, fields: dict[str, Any], param: str, words: str) -> None:
    answer = hermes.post("/v1/chat/completions", {"messages": USER, **fields})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def reasoning(server: Server, **fields: Any) -> Any:
    body = {"messages": USER, "max_tokens": 150, "seed": 3, "temperature": 1.0, "logit_bias": {str(END_THINK): 4.0}}
    answer = server.post("/v1/chat/completions", body | fields)
    assert answer.status_code == 200, answer.text
    return answer


def test_reasoning_is_told_apart(hermes: Server) -> None:
    opened = {"chat_template_kwargs": {"thinks": True}}
    message = reasoning(hermes, **opened).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["reasoning"] == message["reasoning_content"]
    assert "</think>" not in message["reasoning"]
    assert message["content"]
    parts = {"content": "", "reasoning_content": "", "reasoning": ""}
    for line in reasoning(hermes, stream=True, **opened).text.split("\n\n"):
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for name in parts:
                parts[name] += delta.get(name) or ""
    assert parts == {name: message[name] for name in parts}
    hidden = reasoning(hermes, include_reasoning=False, **opened).json()
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": message["content"]}
    # A tag that nobody opened, or one that the template has closed, says nothing.
    for kwargs in ({}, {"chat_template_kwargs": {"thinks": False}}):
        plain = reasoning(hermes, **kwargs).json()["choices"][0]["message"]
        assert set(plain) == {"role", "content"}
        assert "</think>" in plain["content"]


def test_what_must_be_comes_after_the_reasoning(hermes: Server) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        opened = {"chat_template_kwargs": {"thinks": True}, "seed": seed, "max_tokens": 300}
        tight = {"structured_outputs": {"whitespace_pattern": " "}}
        message = reasoning(hermes, response_format=format_, **opened, **tight).json()["choices"][0]["message"]
        assert message["reasoning"]
        assert_follows("weather", message["content"])
        choice = reasoning(hermes, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False, **opened).json()[
            "choices"
        ][0]
        assert choice["message"]["reasoning"]
        assert choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            assert_follows(call["function"]["name"], call["function"]["arguments"])


@pytest.mark.parametrize("special", [False, True])
def test_a_model_need_not_reason(start_server: StartServer, tmp_path: Path, special: bool) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--reasoning-parser", "qwen3", "--chat-template", str(template)]
    server = start_server(*flags, base=str(base_with_marks(tmp_path, special=special)))

    # More likely than white space, and than the beginning of a tag.
    (x,) = server.post("/tokenize", {"prompt": "x"}).json()["tokens"]

    def said(bias: dict[int, float], **fields: Any) -> Any:
        body = {
            "messages": USER, "max_tokens": 60, "temperature": 0, "structured_outputs": {"regex": "[xy]{3}z"},
            "logit_bias": {str(token): value for token, value in ({x: 20.0} | bias).items()},
        }  # fmt: skip
        answer = server.post("/v1/chat/completions", body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    for bias in ({}, {END_THINK: 100.0}):
        # A closing tag says nothing where none was opened.
        choice = said(bias)
        assert choice["finish_reason"] == "stop"
        assert set(choice["message"]) == {"role", "content"}
        assert re.fullmatch("[xy]{3}z", choice["message"]["content"])
    # After the opening tag the closing one is likely.
    for bias, fields in (
        ({THINK: 60.0, END_THINK: 59.0}, {"repetition_penalty": 2.0}),
        ({END_THINK: 50.0}, {"chat_template_kwargs": {"thinks": True}}),
    ):
        choice = said(bias, **fields)
        assert choice["finish_reason"] == "stop", choice
        assert re.fullmatch("[xy]{3}z", choice["message"]["content"]), choice


def test_calls_as_llama_writes_them(start_server: StartServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(LLAMA_TEMPLATE)
    server = start_server("--chat-template", str(template), "--reasoning-parser", "deepseek_r1")
    said = '{"name": "stop", "parameters": {"now": false}}; {"name": "weather", "parameters": {"days": 1, "unit": "F"}}'
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        # The last message has ended the reasoning.
        ended: list[Any] = [*USER, {"role": "assistant", "content": "</think>"}]
        goes_on = {"add_generation_prompt": False, "continue_final_message": True}
        fields = {"structured_outputs": {"choice": [said]}} | goes_on
        answer = chat(client, messages=ended, tools=TOOLS, extra_body=fields)
        calls = [call.function for call in answer.choices[0].message.tool_calls]
        assert [call.name for call in calls] == ["stop", "weather"]
        assert json.loads(calls[1].arguments) == {"days": 1, "unit": "F"}
        demanded = chat(client, messages=ended, tools=TOOLS, tool_choice="required", extra_body=goes_on)
        for call in demanded.choices[0].message.tool_calls:
            assert_follows(call.function.name, call.function.arguments)
        # All that comes before a closing tag is reasoning.
        message = chat(client, max_tokens=5).choices[0].message
        assert message.content is None
        assert message.reasoning_content


def test_no_tools_are_counted_as_they_are_sent(start_server: StartServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools is defined and tools is not none %}You may call: {{ tools }}{% endif %}{{ messages[0].content }}"
    )
    server = start_server("--chat-template", str(template))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}], "tools": []}
    sent = server.post("/v1/chat/completions", body | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    counted = server.post("/tokenize", body).json()
    assert counted["count"] == sent
    assert counted["tokens"] == server.post("/tokenize", {"messages": body["messages"]}).json()["tokens"]


def test_a_template_that_knows_no_tools_has_none(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    body = {"messages": USER, "tools": TOOLS, "max_tokens": 3}
    assert server.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200
    demanded = server.post("/v1/chat/completions", body | {"tool_choice": "required", "max_tokens": 300}).json()
    for call in demanded["choices"][0]["message"]["tool_calls"]:
        assert_follows(call["function"]["name"], call["function"]["arguments"])
