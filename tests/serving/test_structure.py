"""Structured output over HTTP and from Python, on a tiny model whose random weights would say anything else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from manylora import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, ValidationError

from .conftest import ADAPTERS, ORACLE, PROMPT, Server, StartServer, events

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2}$"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "legs", "tags"],
    "additionalProperties": False,
}
TIGHT = {"disable_any_whitespace": True}
CHAT: list[Any] = [{"role": "user", "content": "an animal"}]


def assert_animal(text: str) -> None:
    animal = json.loads(text)
    assert set(animal) == {"kind", "legs", "tags"}
    assert animal["kind"] in ("cat", "dog")
    assert isinstance(animal["legs"], int)
    assert 0 <= animal["legs"] <= 8
    assert 1 <= len(animal["tags"]) <= 2
    assert all(len(tag) == 2 and tag.isascii() and tag.islower() for tag in animal["tags"])


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["base", "alpha"])
def test_completions_follow_what_they_must_be(server: Server, model: str) -> None:
    def said(**outputs: Any) -> str:
        return server.text(model, max_tokens=300, ignore_eos=False, structured_outputs=outputs)

    assert_animal(said(json=SCHEMA, **TIGHT))
    assert_animal(said(json=json.dumps(SCHEMA), whitespace_pattern=" "))
    assert said(choice=["yes", "no"]) in ("yes", "no")
    assert len(said(regex="[a-f]{7}")) == 7
    assert said(grammar='start: "a" "b"{3}') == "abbb"
    assert said(grammar='root ::= "a" more\nmore ::= "b"{2}') == "abb"
    assert server.text(model, max_tokens=300, guided_regex="[xy]{4}").strip("xy") == ""


def test_chats_follow_their_response_format(client: openai.OpenAI) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="alpha", messages=CHAT, response_format=response_format, seed=seed, n=2, temperature=1.2,
            max_tokens=400, extra_body={"structured_outputs": {"whitespace_pattern": " "}},
        )  # fmt: skip
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert_animal(choice.message.content or "")
    pieces = client.chat.completions.create(
        model="base", messages=CHAT, response_format=response_format, max_tokens=400, stream=True,
        extra_body={"structured_outputs": TIGHT},
    )  # fmt: skip
    assert_animal("".join(piece.choices[0].delta.content or "" for piece in pieces))
    anything: Any = {"type": "json_object"}
    answer = client.chat.completions.create(
        model="base", messages=CHAT, response_format=anything, max_tokens=3, extra_body={"structured_outputs": TIGHT}
    )
    assert (answer.choices[0].message.content or "").startswith("{")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(BaseModel):
    size: Annotated[int, Field(ge=1, le=9)]
    flat: bool


class Car(BaseModel):
    colour: Colour
    wheels: Annotated[list[Wheel], Field(min_length=1, max_length=2)]
    owner: Annotated[str, Field(max_length=4)] | None


def test_the_clients_own_classes_are_filled(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model="beta", messages=CHAT, response_format=Car, seed=seed, max_tokens=400, temperature=1.2,
            extra_body={"structured_outputs": {"whitespace_pattern": " "}},
        )  # fmt: skip
        car = answer.choices[0].message.parsed
        assert car is not None
        assert 1 <= len(car.wheels) <= 2
        assert all(1 <= wheel.size <= 9 for wheel in car.wheels)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "`structural_tag` is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "multiple are specified"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        (
            {"structured_outputs": {"json": {"type": "things"}}},
            "structured_outputs",
            "structured_outputs.json cannot be used: ",
        ),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "structured_outputs.regex cannot be used: "),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "structured_outputs.grammar cannot be used: "),
        ({"guided_json": 5}, "guided_json", "a JSON Schema is an object, got `5`"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "things"}}}},
            "response_format",
            "structured_outputs.json cannot be used: ",
        ),
    ],
)
def test_what_cannot_be_followed_is_told(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        answer = server.complete(stream=stream, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert words in error["message"]
        assert error["param"] == param


def test_calls_that_cannot_be_held_to_blame_the_tools(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "things"}}}}}
    body = {"messages": CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 5}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "tools"


def test_a_server_is_ready_for_structures_before_the_first_request(start_server: StartServer) -> None:
    server = start_server("--log-level", "debug")
    deadline = time.monotonic() + 30
    while (ready := "was made ready for structured outputs") not in server.log and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.log.count(ready) == 1
    assert server.text(structured_outputs={"regex": "[xy]{4}"}, ignore_eos=False).strip("xy") == ""


def test_no_grammar_ends_the_server(server: Server) -> None:
    rules = "".join(f"r{index}: r{index + 1}\n" for index in range(6000))
    deep = {"$defs": {f"d{index}": {"items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(300)} | {"d300": {}}}
    deep |= {"$ref": "#/$defs/d0"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/d0"}}}}}
    tool["function"]["parameters"]["$defs"] = deep["$defs"]
    assert server.complete(structured_outputs={"grammar": f'start: r0\n{rules}r6000: "a"\n'}).status_code == 200
    assert server.complete(structured_outputs={"json": deep}).status_code == 200
    body = {"messages": CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 5}
    assert server.post("/v1/chat/completions", body).status_code in (200, 400)
    long = server.complete(structured_outputs={"regex": "a" * 200_000})
    assert long.status_code == 400
    assert "`131072`" in long.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


def test_the_server_is_well_while_a_grammar_is_slow(server: Server) -> None:
    slow = 'start: a\na: a a | b\nb: /[a-z ]/ | /[a-z]/ | " "'
    answer: list[Any] = []
    body = {"structured_outputs": {"grammar": slow}, "max_tokens": 450, "min_tokens": 450, "n": 8, "temperature": 1}
    running = threading.Thread(target=lambda: answer.append(server.complete(**body)))
    running.start()
    answers = 0
    while running.is_alive():
        assert server.client.get("/health").status_code == 200
        answers += 1
    running.join()
    # Half a second of a processor at least, during which whoever waited for the grammar would have had one.
    assert answers > 5
    assert answer[0].status_code == 400
    assert "what may come next takes more than" in answer[0].json()["error"]["message"]


def test_streams_end_where_the_structure_does(server: Server) -> None:
    answer = server.complete(stream=True, max_tokens=50, structured_outputs={"choice": ["one two three"]})
    told = events(answer.text)
    assert told[-1] is None
    assert "".join(event["choices"][0]["text"] for event in told[:-1]) == "one two three"
    assert told[-2]["choices"][0]["finish_reason"] == "stop"


def test_the_same_from_python() -> None:
    base = str(ORACLE / "llama" / "base")
    with LLM(base, device="cpu", dtype="float32", enable_lora=True, kv_cache_memory_bytes=8 << 20) as llm:
        tight = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        all_params = [
            SamplingParams(temperature=0, max_tokens=300, structured_outputs=tight),
            SamplingParams(temperature=1.5, seed=1, max_tokens=300, structured_outputs=tight),
            SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=r"\d{3}")),
            SamplingParams(temperature=0, max_tokens=4),
        ]
        prompts: Any = [{"prompt_token_ids": PROMPT}] * 4
        alpha = LoRARequest("alpha", 1, str(ADAPTERS / "alpha"))
        outputs = llm.generate(prompts, all_params, use_tqdm=False, lora_request=[None, alpha, alpha, None])
        texts = [output.outputs[0].text for output in outputs]
        assert_animal(texts[0])
        assert_animal(texts[1])
        assert texts[2].isdecimal()
        assert len(texts[2]) == 3
        alone = llm.generate(prompts[:1], all_params[0], use_tqdm=False)
        assert alone[0].outputs[0].text == texts[0]
        wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        with pytest.raises(ValidationError, match=r"structured_outputs\.regex cannot be used"):
            llm.generate(prompts[:1], wrong, use_tqdm=False)
