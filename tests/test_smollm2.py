"""The real model with its three adapters: the oracle's tokens, the demo, the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ORACLE
from manylora import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from manylora.cli import demo

MODEL = os.environ.get("MANYLORA_SMOLLM2", "")
# `make test` fetches the model and sets the variable.
if not MODEL and os.environ.get("MANYLORA_REQUIRE_DATA"):
    pytest.fail("MANYLORA_SMOLLM2 is not set", pytrace=False)
pytestmark = pytest.mark.skipif(not MODEL, reason="MANYLORA_SMOLLM2 is not set")

EXPECTED = json.loads((ORACLE / "smollm2" / "expected.json").read_text())
NEAR_TIE = 0.05


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, dtype="float32", enable_lora=True, max_model_len=512, use_tqdm_on_load=False) as llm:
        yield llm


def lora(name: str) -> LoRARequest | None:
    if name == "base":
        return None
    return LoRARequest(name, 1 + demo.NAMES.index(name), str(ORACLE / "smollm2" / "adapters" / name))


def compare(expected: dict[str, Any], tokens: list[int]) -> int:
    """Compare up to the first step that is a near tie; return the number of steps compared."""
    for step, (token, margin) in enumerate(zip(expected["tokens"], expected["margins"], strict=True)):
        if margin < NEAR_TIE:
            return step
        assert tokens[step] == token, f"prompt {expected['prompt']}, step {step}, margin {margin}"
    assert len(tokens) == len(expected["tokens"])
    return len(tokens)


def test_one_mixed_batch_has_the_oracles_tokens(llm: LLM) -> None:
    cases = [(name, case) for name, results in EXPECTED["results"].items() for case in results["dequant"]]
    assert {name for name, _ in cases} == {"base", *demo.NAMES}
    prompts = [EXPECTED["prompts"][case["prompt"]] for _, case in cases]
    params = SamplingParams(temperature=0, max_tokens=EXPECTED["max_new_tokens"])
    outputs = llm.chat(
        [[{"role": "user", "content": prompt["user"]}] for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=[lora(name) for name, _ in cases],
    )
    compared = 0
    for prompt, (_, case), output in zip(prompts, cases, outputs, strict=True):
        assert output.prompt == prompt["text"]
        assert output.prompt_token_ids == prompt["ids"]
        compared += compare(case, output.outputs[0].token_ids)
    assert compared > 0.7 * sum(len(case["tokens"]) for _, case in cases)


def test_the_shipped_adapters_are_the_oracles() -> None:
    for name in demo.NAMES:
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            shipped, expected = demo.ADAPTERS / name / file, ORACLE / "smollm2" / "adapters" / name / file
            assert shipped.read_bytes() == expected.read_bytes()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120, check=False)


def test_the_demo_prints_a_table_and_that_rows_equal_their_solo_runs() -> None:
    done = run(str(Path(sys.executable).parent / "manylora"), "demo", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["row", "adapter", "answer", "tokens/s"]
    rows = [line.split(maxsplit=2) for line in lines[1 : 1 + len(demo.ROWS)]]
    assert [row[0] for row in rows] == [str(number) for number in range(len(demo.ROWS))]
    answers = {adapter: answer for _, adapter, answer in rows}
    assert answers["sql"].startswith("SELECT ")
    assert answers["json"].startswith('{"action":')
    assert answers["support"].startswith("Thank you for reaching out!")
    assert rows[3][2].startswith("The capital of France is Paris.")
    assert lines[-1] == "Every answer equals its solo run, token for token and logprob for logprob."
    assert "tokens/s" in lines[-2]
    assert "KV blocks" in done.stderr


def test_the_example_runs_two_adapters_and_the_base(llm: LLM) -> None:
    example = Path(__file__).parent.parent / "examples" / "multi_lora_offline.py"
    done = run(sys.executable, str(example), "--model", MODEL, "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    sections = done.stdout.split("[")[1:]
    answers = {section.split("]")[0]: section.split("\n", 1)[1].strip() for section in sections}
    assert list(answers) == ["sql", "base", "support"]
    assert answers["sql"].startswith("SELECT")
    with LLM(MODEL, max_model_len=512, use_tqdm_on_load=False) as base:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        params = SamplingParams(temperature=0, max_tokens=16)
        assert base.chat(question, params, use_tqdm=False)[0].outputs[0].text.strip() == answers["base"]
    assert answers["support"].startswith("Thank you")


def test_structured_answers_say_what_the_model_knows(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}, "continent": {"enum": ["Africa", "Asia", "Europe"]}},
        "required": ["capital", "continent"],
        "additionalProperties": False,
    }
    structures: list[StructuredOutputsParams | None] = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(regex=r"(The )?[Cc]apital of France is [A-Z][a-z]+\."),
        StructuredOutputsParams(choice=["London", "Paris", "Berlin"]),
        None,
    ]
    all_params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=it) for it in structures]
    question: Any = [{"role": "user", "content": "What is the capital of France, and its continent? Answer in JSON."}]
    outputs = llm.chat([question] * 4, all_params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert json.loads(texts[0]) == {"capital": "Paris", "continent": "Europe"}
    assert texts[1].endswith("apital of France is Paris.")
    assert texts[2] == "Paris"
    # Beside the others, and alone.
    for index, params in enumerate(all_params):
        assert llm.chat(question, params, use_tqdm=False)[0].outputs[0].text == texts[index]
