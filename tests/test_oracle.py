"""Results equal those of PEFT for every base and adapter; what is refused, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import BASES, ORACLE, MakeEngine, adapter_path, greedy, logits_of
from manylora import AdapterError, LoRARequest
from oracle.oracle_check import Oracle

GetOracle = Callable[[str], Oracle]

# Of those that may be refused, what this version refuses by name; the rest must load and match.
REFUSED = {
    "llama": {"mts-head", "mts-embed-head", "mts-norm", "dora", "dora-all", "dora-rs", "lora-bias", "token-rows",
              "alora", "bin", "pissa"},
    "llama-tied": {"mts-head", "mts-embed-head-ewt", "token-rows"},
    "llama-odd": {"dora"},
    "qwen2": {"bias-all", "bias-lora-only", "lora-bias", "dora"},
    "qwen2-padded": {"mts-head", "bias-all"},
    "qwen3": {"dora", "mts-qnorm"},
}  # fmt: skip


def load(llm, base: str, manifest: dict) -> dict[str, LoRARequest]:
    """Load all adapters of a base that this version does not refuse."""
    names = [name for name in manifest["adapters"] if name not in REFUSED.get(base, ())]
    requests = {name: LoRARequest(name, number, adapter_path(name, base)) for number, name in enumerate(names, start=1)}
    for request in requests.values():
        assert llm.llm_engine.add_lora(request)
    return requests


@pytest.mark.parametrize("base", BASES)
def test_logits_of_the_base_and_of_every_adapter(base: str, make_engine: MakeEngine, oracle: GetOracle) -> None:
    llm, expected = make_engine(base), oracle(base)
    loaded = load(llm, base, expected.m)
    compared = 0
    for adapter, prompt, ids in expected.cases():
        if adapter is None or adapter in loaded:
            expected.compare_logits(adapter, prompt, logits_of(llm, ids, adapter))
            compared += 1
    assert compared >= len(loaded)


@pytest.mark.parametrize("base", BASES)
def test_one_mixed_batch_has_the_greedy_tokens_and_prompt_logprobs(
    base: str, make_engine: MakeEngine, oracle: GetOracle
) -> None:
    llm, expected = make_engine(base), oracle(base)
    loaded = load(llm, base, expected.m)
    cases = [case for case in expected.cases() if case[0] is None or case[0] in loaded]
    outputs = llm.generate(
        [ids for _, _, ids in cases],
        greedy(16, prompt_logprobs=0, logprobs=0),
        use_tqdm=False,
        lora_request=[None if adapter is None else loaded[adapter] for adapter, _, _ in cases],
    )
    steps = 0
    for (adapter, prompt, ids), output in zip(cases, outputs, strict=True):
        sample = output.outputs[0]
        compared = expected.compare_greedy(adapter, prompt, sample.token_ids)
        steps += compared
        logprobs = [position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        wanted = expected.array(adapter, prompt, "greedy_logprobs")[:compared]
        assert np.abs(np.array(logprobs[:compared]) - wanted).max(initial=0) <= 1e-4
        assert output.prompt_logprobs[0] is None
        seen = [position[token].logprob for position, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        if seen:
            expected.compare_logprobs(adapter, prompt, seen)
    assert steps > 12 * len(cases)


@pytest.mark.parametrize("base", BASES)
def test_raw_logits_come_through_generate(base: str, make_engine: MakeEngine, oracle: GetOracle) -> None:
    llm, expected = make_engine(base, logprobs_mode="raw_logits", max_logprobs=-1), oracle(base)
    lora_request = LoRARequest("alpha", 1, adapter_path("alpha", base))
    for adapter in (None, "alpha"):
        ids = expected.m["prompts"]["mid"]["ids"]
        (output,) = llm.generate(
            ids,
            greedy(1, prompt_logprobs=-1, logprobs=-1),
            use_tqdm=False,
            lora_request=lora_request if adapter else None,
        )
        positions = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        width = expected.m["model_vocab"]
        expected.compare_logits(adapter, "mid", [[row[token].logprob for token in range(width)] for row in positions])
        best = max(range(width), key=lambda token: positions[-1][token].logprob)
        assert positions[-1][best].rank == 1
        assert output.outputs[0].token_ids == [best]


@pytest.mark.parametrize("base", sorted(REFUSED))
def test_a_06_to_a_14_what_cannot_be_applied_is_refused_by_name(
    base: str, make_engine: MakeEngine, oracle: GetOracle
) -> None:
    llm, manifest = make_engine(base), oracle(base).m
    optional = {name for name, entry in manifest["adapters"].items() if entry["expect"] != "load"}
    assert REFUSED[base] <= optional
    for name in sorted(REFUSED[base]):
        with pytest.raises(AdapterError) as refusal:
            llm.llm_engine.add_lora(LoRARequest(name, 1, adapter_path(name, base)))
        error = refusal.value
        assert error.adapter == name
        assert name in str(error)
        assert error.reason in str(error)
        assert error.keys, name
        assert any(key in str(error) for key in error.keys), (name, error.keys, str(error))
        assert llm.llm_engine.list_loras() == set()


def refusal_of(llm, request: LoRARequest) -> AdapterError | None:
    try:
        llm.llm_engine.add_lora(request)
    except AdapterError as error:
        return error
    return None


def test_malformed_adapters_are_refused_or_equal_what_they_stand_for(
    make_engine: MakeEngine, oracle: GetOracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = json.loads((ORACLE / "malformed" / "manifest.json").read_text())
    # The folder is the root: some of its links leave it.
    llm = make_engine("llama", lora_root=str(ORACLE / "malformed"))
    assert {entry["base"] for entry in manifest["adapters"].values()} == {"llama"}
    outcomes = dict.fromkeys(("loaded", "refused"), 0)
    for number, (name, entry) in enumerate(manifest["adapters"].items(), start=1):
        request = LoRARequest(name, number, str(ORACLE / "malformed" / name))
        before = llm.llm_engine.list_loras()
        refusal = refusal_of(llm, request)
        if refusal:
            assert entry["expect"] != "load", f"{name}: {refusal}"
            assert refusal.adapter == name
            assert refusal.reason, name
            assert name in str(refusal)
            assert llm.llm_engine.list_loras() == before
            outcomes["refused"] += 1
        else:
            assert entry["expect"] != "refuse", f"{name} was loaded although: {entry['reason']}"
            for prompt in ("one", "mid") if "equals" in entry else ():
                equals, ids = entry["equals"].split("/")[1], oracle("llama").m["prompts"][prompt]["ids"]
                adapter = None if equals == "base" else equals
                expected = oracle("llama")
                if prompt in expected.part(adapter):
                    expected.compare_logits(adapter, prompt, logits_of(llm, ids, name))
            outcomes["loaded"] += 1
    assert outcomes["loaded"] >= 6
    assert outcomes["refused"] >= 50
    assert not (tmp_path / "ORACLE_PICKLE_WAS_EXECUTED").exists()


def test_a_13_values_beyond_fp16_are_refused_where_weights_are_fp16(make_engine: MakeEngine) -> None:
    llm = make_engine("llama", dtype="float16")
    with pytest.raises(AdapterError, match="70000"):
        llm.llm_engine.add_lora(LoRARequest("fp16-overflow", 1, str(ORACLE / "malformed" / "fp16-overflow")))


@pytest.mark.parametrize("base", BASES)
def test_a_15_every_accepted_adapter_with_an_effect_changes_logits(
    base: str, make_engine: MakeEngine, oracle: GetOracle
) -> None:
    llm, expected = make_engine(base), oracle(base)
    ids = expected.m["prompts"]["mid"]["ids"]
    alone = logits_of(llm, ids)
    for name in load(llm, base, expected.m):
        difference = float(np.abs(logits_of(llm, ids, name) - alone).max())
        report = llm.load_report(name)
        if name == "null":
            assert difference == 0.0
            assert all(module["effect"] == 0.0 for module in report["modules"].values())
        else:
            assert difference > 0.01, name
            assert any(module["effect"] > 0.0 for module in report["modules"].values())
