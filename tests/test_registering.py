"""Adapters registered without being read, and what is refused at once: through `llm_engine`, one by one or many."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import LONG_PROMPT, ORACLE, PROMPT, MakeEngine, adapter_path, answer, greedy, lora, named, solo
from manylora import LLM, AdapterError, LoRARequest, ManyLoRAError, ValidationError
from manylora.exceptions import (
    AdapterConflictError,
    AdapterNotFoundError,
    HubError,
    RequestError,
    UnknownAdapterError,
)
from test_memory_adapters import given

MakeAdapter = Callable[..., str]
MALFORMED = ORACLE / "malformed"


def test_registered_adapters_are_read_when_a_request_names_them(llm: LLM, expected: Callable) -> None:
    engine = llm.llm_engine
    names = ("alpha", "beta", "pattern")
    assert engine.register_loras(lora(name, number) for number, name in enumerate(names, start=1)) == {}
    assert engine.list_loras() == {1, 2, 3}
    assert engine.stats()["adapter_reads"] == 0
    assert engine.stats()["adapter_bytes"] == 0
    report = llm.load_report("pattern")
    assert report["version"] is None
    assert report["modules"]["model.layers.0.self_attn.q_proj"]["scale"] == 2.0
    assert {module["effect"] for module in report["modules"].values()} == {None}
    for number, name in enumerate(names, start=1):
        for _ in range(2):
            assert solo(llm, lora(name, number)) == expected(name)
        assert engine.stats()["adapter_reads"] == number
    report = llm.load_report("pattern")
    assert len(report["version"]) == 64
    assert all(module["effect"] > 0 for module in report["modules"].values())
    # Loading what is registered reads it now.
    assert engine.register_loras([lora("gamma", 9)]) == {}
    assert engine.add_lora(lora("gamma", 9))
    assert llm.load_report("gamma")["version"] is not None
    assert engine.stats()["adapter_reads"] == 4


def test_a_manifest_registers_many_and_names_those_it_cannot(llm: LLM, tmp_path: Path, expected: Callable) -> None:
    folder = tmp_path / "beside"
    shutil.copytree(adapter_path("beta"), folder)
    entries = [
        {"name": "alpha", "path": adapter_path("alpha"), "id": 4},
        {"name": "near", "path": "beside"},
        {"name": "dora", "path": adapter_path("dora"), "id": 5},
        {"name": "gone", "path": str(tmp_path / "gone")},
        {"name": "gamma", "path": adapter_path("gamma"), "id": 6},
    ]
    manifest = tmp_path / "adapters.json"
    manifest.write_text(json.dumps(entries))
    refused = llm.llm_engine.register_loras(manifest)
    assert set(refused) == {"dora", "gone"}
    assert "use_dora" in str(refused["dora"])
    assert isinstance(refused["gone"], AdapterNotFoundError)
    assert llm.llm_engine.list_loras() == {4, 6}
    assert [record.name for record in llm.llm_engine.core.list_adapters()] == ["alpha", "gamma", "near"]
    # A request brings the id that the manifest left out; nothing but the first use reads it.
    near = LoRARequest("near", 77, str(folder))
    assert solo(llm, near) == solo(llm, near) == expected("beta")
    assert llm.llm_engine.list_loras() == {4, 6, 77}
    assert llm.llm_engine.stats()["adapter_reads"] == 1
    assert llm.llm_engine.remove_lora(77)
    with pytest.raises(UnknownAdapterError, match="`near` is not loaded; loaded: alpha, gamma"):
        llm.load_report("near")


def test_the_example_registers_replaces_and_unloads(tmp_path: Path) -> None:
    entries = [{"name": name, "path": adapter_path(name)} for name in ("alpha", "beta", "dora")]
    manifest = tmp_path / "adapters.json"
    manifest.write_text(json.dumps([entry | {"id": 7 + number} for number, entry in enumerate(entries)]))
    example = Path(__file__).parent.parent / "examples" / "adapter_shelf.py"
    command = [sys.executable, example, "--model", ORACLE / "llama" / "base", "--manifest", manifest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    refused, registered, alpha, beta, asked, replaced, unloaded = done.stdout.splitlines()
    assert refused.startswith("refused: dora: ")
    assert registered.startswith("registered 2: 0 resident in 0 bytes, 0 read so far")
    assert (alpha[:7], beta[:6]) == ("[alpha]", "[beta]")
    assert asked.startswith("asked: 2 resident")
    old, new = replaced.split(": ", 1)[1].split(", then ")
    assert (old, new) == (alpha.removeprefix("[alpha] "), beta.removeprefix("[beta] "))
    assert unloaded.startswith("unloaded: 0 resident in 0 bytes, 3 read so far")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"name": "a"}', "must hold a list"),
        ('["a"]', "entry 0 .* must have a `name`"),
        ('[{"name": "a", "path": "p"}, {"name": "b"}]', "entry 1 "),
        ('[{"name": "a", "path": ""}]', "entry 0 "),
        ('[{"name": "a", "path": "p", "id": true}]', "positive integer"),
        ('[{"name": "a", "path": "p", "id": 0}]', "positive integer"),
        ('[{"name": "a", "path": "p", "id": "7"}]', "positive integer"),
    ],
)
def test_a_manifest_that_is_none_registers_nothing(text: str, message: str, llm: LLM, tmp_path: Path) -> None:
    manifest = tmp_path / "adapters.json"
    manifest.write_text(text)
    with pytest.raises(ValidationError, match=message):
        llm.llm_engine.register_loras(manifest)
    with pytest.raises(ValidationError, match="cannot be read"):
        llm.llm_engine.register_loras(tmp_path / "not-there.json")
    assert llm.llm_engine.core.list_adapters() == []


def test_what_cannot_be_registered_is_said(make_engine: MakeEngine, llm: LLM) -> None:
    with pytest.raises(ValidationError, match="`alpha` is given in memory"):
        llm.llm_engine.register_loras([lora("beta", 2), given("alpha", 1)])
    refused = llm.llm_engine.register_loras([named("a\nb", 1, "alpha"), lora("beta", 2)])
    assert "control characters" in str(refused["a\nb"])
    assert llm.llm_engine.list_loras() == {2}
    with pytest.raises(ValidationError, match="LoRA is not enabled"):
        make_engine(enable_lora=False).llm_engine.register_loras([lora("alpha", 1)])


def test_an_adapter_that_turns_out_bad_fails_its_own_requests(llm: LLM, expected: Callable) -> None:
    bad = LoRARequest("bad", 1, str(MALFORMED / "nan"))
    assert llm.llm_engine.register_loras([bad, lora("beta", 2)]) == {}
    requests = [bad, lora("beta", 2), None, bad]
    with pytest.raises(RequestError, match=r"2 of 4 requests failed.*`bad`") as failure:
        llm.generate([PROMPT] * 4, greedy(8, logprobs=1), use_tqdm=False, lora_request=requests)
    outputs = failure.value.outputs
    assert [output is None for output in outputs] == [True, False, False, True]
    assert answer(outputs[1]) == expected("beta")
    assert answer(outputs[2]) == expected(None)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("lazily", [False, True])
def test_a_22_what_cannot_be_read_is_answered_at_load(
    lazily: bool, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Callable
) -> None:
    offline(monkeypatch)
    not_a_file, unreadable = tmp_path / "not-a-file", tmp_path / "unreadable"
    for folder in (not_a_file, unreadable):
        shutil.copytree(adapter_path("alpha"), folder)
    (not_a_file / "adapter_model.safetensors").unlink()
    (not_a_file / "adapter_model.safetensors").mkdir()
    cases: list[tuple[str, type[Exception], str]] = [
        (str(tmp_path / "missing"), AdapterNotFoundError, "no such folder"),
        (str(ORACLE / "llama" / "manifest.json"), AdapterError, "is a file"),
        (str(not_a_file), AdapterError, "adapter_model.safetensors"),
        ("someone/adapter-of-theirs", HubError, "not in the hub cache"),
    ]
    if os.geteuid() != 0:
        unreadable.chmod(0)
        cases.append((str(unreadable), AdapterError, "denied"))
    assert llm.llm_engine.add_lora(lora("beta", 9))
    for path, kind, reason in cases:
        request = LoRARequest("x", 1, path)
        if lazily:
            error: Exception = llm.llm_engine.register_loras([request])["x"]
        else:
            with pytest.raises(ManyLoRAError) as refusal:
                llm.llm_engine.add_lora(request)
            error = refusal.value
        assert isinstance(error, kind), path
        assert reason in str(error), path
        assert llm.llm_engine.list_loras() == {9}
        with pytest.raises(ManyLoRAError):
            solo(llm, request)
    unreadable.chmod(0o755)
    # The name and the id are free for the right one.
    assert solo(llm, named("x", 1, "alpha")) == expected("alpha")
    assert llm.llm_engine.list_loras() == {1, 9}


@pytest.mark.parametrize("lazily", [False, True])
def test_a_28_a_folder_of_adapters_in_every_state(lazily: bool, llm: LLM, tmp_path: Path, expected: Callable) -> None:
    for name in ("good", "no-type", "null-base", "growing"):
        shutil.copytree(adapter_path("alpha"), tmp_path / name)
    (tmp_path / "empty").mkdir()
    for name, change in (("no-type", "peft_type"), ("null-base", "base_model_name_or_path")):
        file = tmp_path / name / "adapter_config.json"
        config = json.loads(file.read_text())
        if name == "no-type":
            del config[change]
        else:
            config[change] = None
        file.write_text(json.dumps(config))
    weights = tmp_path / "growing" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    requests = {
        path.name: LoRARequest(path.name, number, str(path))
        for number, path in enumerate(sorted(tmp_path.iterdir()), start=1)
    }

    def attempt(names: list[str]) -> dict[str, ManyLoRAError]:
        if lazily:
            return llm.llm_engine.register_loras([requests[name] for name in names])
        refused = {}
        for name in names:
            try:
                llm.llm_engine.add_lora(requests[name])
            except AdapterError as error:
                refused[name] = error
        return refused

    refused = attempt(list(requests))
    assert {name: error.adapter for name, error in refused.items()} == {
        name: name for name in ("empty", "no-type", "growing")
    }
    for name, reason in (("empty", "adapter_config.json"), ("no-type", "peft_type"), ("growing", "safetensors")):
        assert reason in str(refused[name])
    for name in ("good", "null-base"):
        assert solo(llm, requests[name]) == expected("alpha")
    # Half of the file is there, then all of it: no failure is remembered.
    weights.write_bytes(content[: len(content) // 2])
    assert set(attempt(["growing"])) == {"growing"}
    with pytest.raises(AdapterError):
        solo(llm, requests["growing"])
    weights.write_bytes(content)
    assert attempt(["growing"]) == {}
    assert solo(llm, requests["growing"]) == expected("alpha")
    assert len(llm.llm_engine.stats()["adapters"]) == 1


def cached(llm: LLM, request: LoRARequest | None) -> int:
    return llm.generate(LONG_PROMPT, greedy(2), use_tqdm=False, lora_request=request)[0].num_cached_tokens


def test_a_40_adapters_read_on_demand_share_by_content(llm: LLM) -> None:
    requests = [lora("alpha", 1), lora("beta", 2), named("again", 3, "alpha")]
    assert llm.llm_engine.register_loras(requests) == {}
    alpha, beta, again = requests
    # The first request of an adapter that nobody has read finds what its content has cached, and only that.
    assert [cached(llm, request) for request in (None, alpha, beta, again, alpha, None)] == [0, 0, 0, 48, 48, 48]
    # Unloading and loading again leads to the same content, whatever the name and the id.
    assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.remove_lora(3)
    assert cached(llm, named("other", 8, "alpha")) == 48
    assert cached(llm, named("x", 9, "gamma")) == 0


def test_a_41_an_id_in_use_is_not_taken_over_unread(llm: LLM, make_adapter: MakeAdapter) -> None:
    engine = llm.llm_engine
    assert engine.register_loras([lora("alpha", 1)]) == {}
    refused = engine.register_loras([named("other", 1, "beta"), named("third", 3, "gamma")])
    assert isinstance(refused["other"], AdapterConflictError)
    assert "id 1" in str(refused["other"])
    assert engine.list_loras() == {1, 3}
    with pytest.raises(AdapterConflictError, match="id 1"):
        engine.add_lora(named("other", 1, "beta"))
    # Nor by a name that is there and is read for this.
    for _ in range(2):
        with pytest.raises(AdapterConflictError, match="id 1"):
            solo(llm, named("third", 1, "gamma"))
        with pytest.raises(AdapterConflictError, match="id 1"):
            engine.add_lora(named("third", 1, "gamma"))
        assert engine.list_loras() == {1, 3}
        solo(llm, lora("alpha", 1))
        solo(llm, named("third", 3, "gamma"))
    # Other content at a registered place or name is a conflict, or a replacement if that is asked for.
    with pytest.raises(AdapterConflictError):
        solo(llm, named("alpha", 1, "beta"))
    assert engine.register_loras([named("alpha", 1, "beta")]).keys() == {"alpha"}
    assert engine.register_loras([LoRARequest("alpha", 1, make_adapter("copy", "alpha"))]) == {}
    assert cached(llm, LoRARequest("alpha", 1, adapter_path("beta"), load_inplace=True)) == 0
