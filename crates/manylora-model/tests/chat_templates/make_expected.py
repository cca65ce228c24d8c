"""Writes expected.json: what Python's Jinja, set up as transformers does, makes of published chat templates.

Usage: python make_expected.py FOLDER, where FOLDER holds the published `*.jinja` files (those of llama.cpp's
models/templates). Needs jinja2. The templates themselves are not committed; the conversations are our own. Of the model
families that load here the whole text is kept, of the others its SHA-256.
"""

import datetime
import hashlib
import json
import sys
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

NOW = 1767323045  # 2026-01-02 03:04:05
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather at a place <now> & later, it\'s "exact"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "get_weather", "arguments": {"city": "Wien ä", "hot": True, "by": 0.5}},
}
CONVERSATIONS = {
    "short": {"messages": [{"role": "user", "content": "Wie heißt die Hauptstadt? 🙂"}]},
    "system": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " What is 2 < 3 & 'x'? "},
            {"role": "assistant", "content": "It is\ntrue."},
            {"role": "user", "content": "Why?"},
        ]
    },
    "closed": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Vienna?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"degrees": 21}'},
        ],
        "tools": TOOLS,
    },
    "no_thinking": {
        "messages": [{"role": "user", "content": "Think?"}],
        "kwargs": {"enable_thinking": False},
    },
}


FAMILIES = ("Qwen", "meta-llama", "mistralai", "HuggingFaceTB", "NousResearch", "deepseek-ai-DeepSeek-R1-Distill")


class Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks print their content."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller):
        return caller()


class Refused(Exception):
    """The template itself refuses the conversation."""


def raise_exception(message):
    raise Refused(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(pattern):
    return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None).strftime(pattern)


def render(source, conversation):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    variables = {
        **SPECIAL,
        "messages": conversation["messages"],
        "tools": conversation.get("tools"),
        "documents": None,
        "add_generation_prompt": conversation.get("add_generation_prompt", True),
        **conversation.get("kwargs", {}),
    }
    try:
        return {"text": environment.from_string(source).render(**variables)}
    except Refused as error:
        return {"refused": str(error)}
    except (jinja2.exceptions.TemplateError, TypeError) as error:
        return {"python_error": str(error)}


def main():
    folder = Path(sys.argv[1])
    templates = {}
    for path in sorted(folder.glob("*.jinja")):
        rendered = {name: render(path.read_text(), conversation) for name, conversation in CONVERSATIONS.items()}
        if not path.stem.startswith(FAMILIES):
            for result in rendered.values():
                if "text" in result:
                    result["sha256"] = hashlib.sha256(result.pop("text").encode()).hexdigest()
        templates[path.stem] = rendered
    expected = {"now": NOW, "special": SPECIAL, "conversations": CONVERSATIONS, "templates": templates}
    target = Path(__file__).with_name("expected.json")
    target.write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
