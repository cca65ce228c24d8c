"""Shares of the service: whose turn it is, shown by what a later request finds computed by an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conftest import PROMPT, MakeEngine, greedy, lora, solo
from manylora import LLM, ValidationError
from manylora.exceptions import UnknownAdapterError


def in_turn(llm: LLM, prompts: list[dict[str, Any]], count: int = 8) -> list[int]:
    """Run prompts one at a time, all of which wait together; return how many tokens each found cached."""
    # The one that runs while they are queued.
    llm.enqueue(PROMPT, greedy(400))
    llm.enqueue(prompts, greedy(count))
    return [output.num_cached_tokens for output in llm.wait_for_completion(use_tqdm=False)[1:]]


def distinct(number: int) -> list[int]:
    return [3 + (number * 37 + i * i) % 280 for i in range(33)]


@pytest.mark.parametrize(("policy", "overtakes"), [("fair", True), ("fcfs", False)])
def test_a_tenant_does_not_wait_for_the_flood_of_another(policy: str, overtakes: bool, make_engine: MakeEngine) -> None:
    llm = make_engine(scheduling_policy=policy, max_num_seqs=1)
    flood = [{"prompt_token_ids": distinct(number), "tenant": "many"} for number in range(40)]
    # The same prompts as the flood's last: who comes later finds them cached.
    few = [{"prompt_token_ids": distinct(38 + number), "tenant": "few"} for number in range(2)]
    assert in_turn(llm, flood + few) == ([0] * 38 + [32, 32, 0, 0] if overtakes else [0] * 40 + [32, 32])


def test_weights_are_shares(make_engine: MakeEngine, expected: Callable) -> None:
    # Twice the share: three of the heavy one's and one of the light one's, then two to one. Equal shares: one to one.
    for weight, order in ((1.0, [0, 32]), (2.0, [32, 0])):
        llm = make_engine(max_num_seqs=1)
        llm.llm_engine.set_weight(weight, tenant="heavy")
        heavy = [{"prompt_token_ids": distinct(number), "tenant": "heavy"} for number in range(6)]
        light = [{"prompt_token_ids": distinct(number), "tenant": "light"} for number in (20, 2)]
        hits = in_turn(llm, heavy + light)
        assert [hits[-1], hits[2]] == order
    llm.llm_engine.add_lora(lora("alpha", 1))
    llm.llm_engine.set_weight(0.5, adapter="alpha")
    llm.llm_engine.set_weight(3)
    assert solo(llm, lora("alpha", 1)) == expected("alpha")
    with pytest.raises(UnknownAdapterError):
        llm.llm_engine.set_weight(1, adapter="nobody")
    with pytest.raises(ValidationError, match="not to both"):
        llm.llm_engine.set_weight(1, adapter="alpha", tenant="heavy")
    for wrong in (0, -1.0, float("nan"), float("inf"), "2", True, None):
        with pytest.raises(ValidationError, match="weight"):
            llm.llm_engine.set_weight(wrong, tenant="heavy")
    with pytest.raises(ValidationError, match="tenant must be a non-empty string"):
        llm.llm_engine.set_weight(1, tenant="")


@pytest.mark.parametrize("tenant", ["", 5, ["a"]])
def test_a_tenant_is_a_name(tenant: Any, llm: LLM) -> None:
    with pytest.raises(ValidationError, match="tenant must be a non-empty string"):
        llm.generate({"prompt_token_ids": PROMPT, "tenant": tenant}, greedy(1), use_tqdm=False)
