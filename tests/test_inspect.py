"""`manylora inspect`: the report of what matches, of what is ignored and of what is refused; ranks against numpy's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import ORACLE, MakeEngine, adapter_path
from manylora import LoRARequest
from manylora.cli import main
from manylora.exceptions import AdapterError
from manylora.inspection import inspect_adapter

BASE = str(ORACLE / "llama" / "base")
SNAPSHOTS = Path(__file__).parent / "snapshots"


def shown(adapter: str, capfd: pytest.CaptureFixture[str], *flags: str, status: int = 0, base: str = BASE) -> str:
    assert main(["inspect", adapter, "--base", base, *flags]) == status
    printed, told = capfd.readouterr()
    assert told == ""
    return printed.replace(str(Path(adapter).parent), "<folder>")


def pairs(folder: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of an adapter by module, in float64."""
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    found = {}
    for key in tensors:
        for a, b in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
            if key.endswith(a):
                stem = key.removesuffix(a)
                module = stem.removeprefix("base_model.model.")
                found[module] = (tensors[key].astype("f8"), tensors[stem + b].astype("f8"))
    return found


@pytest.mark.parametrize("name", ["embed-head", "pattern-rs", "rs16-embed-head", "rank64", "null", "layers-1"])
def test_ranks_and_sizes_are_numpys(name: str, make_engine: MakeEngine) -> None:
    folder = adapter_path(name)
    found = inspect_adapter(folder, BASE)
    assert found["accepted"]
    expected = pairs(folder)
    assert set(found["modules"]) == set(expected)
    for module, (a, b) in expected.items():
        one = found["modules"][module]
        values = np.linalg.svd(b @ a, compute_uv=False)[: min(a.shape[0], *(b @ a).shape)]
        np.testing.assert_allclose(one["singular_values"], values, atol=1e-13 * values.max(initial=1e-300), rtol=0)
        assert one["numerical_rank"] == np.linalg.matrix_rank((b @ a).astype("f4"))
        shares = values[values > 0] / values.sum() if values.sum() else values[:0]
        assert one["entropy_rank"] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()) if len(shares) else 0.0)
        assert (one["output"], one["input"], one["rank"]) == (b.shape[0], a.shape[1], a.shape[0])
        assert one["effect"] == pytest.approx(abs(one["scale"]) * np.linalg.norm(b @ a), rel=1e-6)
    # What an engine that has loaded it says.
    llm = make_engine(dtype="bfloat16", max_lora_rank=64)
    llm.llm_engine.add_lora(LoRARequest(name, 1, folder))
    report = llm.load_report(name)
    assert found["bytes"] == report["bytes"]
    for key in ("version", "matched", "ignored", "refused"):
        assert found["report"][key] == report[key]
    for module, one in report["modules"].items():
        assert {key: found["modules"][module][key] for key in ("rank", "scale", "effect")} == one


def test_directions_that_are_used_twice_count_once(make_adapter: Callable[..., str]) -> None:
    def twice(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for key, value in tensors.items():
            if key.endswith("lora_A.weight"):
                value[1:] = value[:1]
        return tensors

    found = inspect_adapter(make_adapter("twice", "alpha", tensors=twice), BASE)
    for one in found["modules"].values():
        assert (one["rank"], one["numerical_rank"]) == (4, 1)
        assert one["entropy_rank"] == pytest.approx(1.0)


def test_alpha_and_scale_by_module() -> None:
    modules = inspect_adapter(adapter_path("pattern-rs"), BASE)["modules"]
    got = {name: (one["rank"], one["alpha"]) for name, one in modules.items()}
    assert got["model.layers.1.self_attn.q_proj"] == (8, 8.0)
    assert got["model.layers.0.self_attn.v_proj"] == (4, 32.0)
    for name, one in modules.items():
        assert one["scale"] == pytest.approx(got[name][1] / math.sqrt(got[name][0]))


def snapshot(name: str, text: str) -> None:
    """Compare with what was found good; a missing file is written, and the test fails once."""
    file = SNAPSHOTS / f"{name}.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"{file} is new: look at it")
    assert text == file.read_text()


def test_snapshot_of_matched_and_ignored_keys(capfd: pytest.CaptureFixture[str]) -> None:
    snapshot("inspect-embed-head", shown(adapter_path("embed-head"), capfd))


@pytest.mark.parametrize("name", ["dora", "lora-bias", "mts-embed-head", "token-rows", "pissa"])
def test_snapshots_of_refused_keys(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    snapshot(f"inspect-{name}", shown(adapter_path(name), capfd, status=1))


def damaged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Something of everything: another shape, a factor alone, a foreign module, a layer too many, a bias."""
    stem = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    q, v, other = (stem.format(0, "q", "A"), stem.format(0, "v", "B"), stem.format(1, "q", "A"))
    tensors[q] = np.zeros((2, 40), "f4")
    del tensors[v]
    tensors[other.replace("q_proj", "x_proj")] = np.zeros((2, 32), "f4")
    tensors[other.replace("layers.1", "layers.7")] = np.zeros((2, 32), "f4")
    tensors[other.replace("lora_A.weight", "lora_B.bias")] = np.zeros(32, "f4")
    return tensors


def test_every_key_is_told_whatever_else_is_wrong(
    make_adapter: Callable[..., str], capfd: pytest.CaptureFixture[str], make_engine: MakeEngine
) -> None:
    path = make_adapter("damaged", "small", tensors=damaged)
    snapshot("inspect-damaged", shown(path, capfd, status=1))
    report = inspect_adapter(path, BASE)["report"]
    keys = set(load_file(Path(path) / "adapter_model.safetensors"))
    assert set(report["matched"]) | set(report["refused"]) | set(report["ignored"]) == keys
    # The configuration's own faults come on top, and hide none of them.
    config = {"use_dora": True, "bias": "all", "r": 99}
    both = inspect_adapter(make_adapter("worse", "small", config=config, tensors=damaged), BASE, max_lora_rank=64)
    assert (
        both["report"]["refused"].items()
        >= {
            "use_dora": "ManyLoRA does not yet support DoRA; merge it or train it without DoRA",
            "bias": "Adapter bias is not supported: bias='all'",
            "r": "LoRA rank 99 is greater than max_lora_rank 64",
        }.items()
    )
    assert keys <= {*both["report"]["matched"], *both["report"]["refused"]}
    # Serving it, the reason is the same.
    with pytest.raises(AdapterError) as refusal:
        make_engine().llm_engine.add_lora(LoRARequest("damaged", 1, path))
    assert refusal.value.reason == inspect_adapter(path, BASE)["reason"]


def test_limits_and_other_bases(make_adapter: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    told = shown(adapter_path("rank64"), capfd, "--max-lora-rank", "16", status=1)
    assert "LoRA rank 64 is greater than max_lora_rank 16" in told
    assert "accepted" in shown(adapter_path("rank64"), capfd)
    other = str(ORACLE / "llama-odd" / "base")
    assert "this base needs" in shown(adapter_path("alpha"), capfd, status=1, base=other)

    def nothing(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        key = sorted(tensors)[0]
        tensors[key][0, 0] = np.nan
        return tensors

    told = shown(make_adapter("diverged", "small", tensors=nothing), capfd, status=1)
    assert "training diverged" in told


def test_json_is_all_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(shown(adapter_path("alpha"), capfd, "--json", "--dtype", "float32"))
    half = inspect_adapter(adapter_path("alpha"), BASE)
    assert (found["dtype"], half["dtype"], found["bytes"]) == ("float32", "bfloat16", 2 * half["bytes"])
    assert found["parameters"] == sum(one["parameters"] for one in found["modules"].values())
    assert found["bytes"] == sum(one["bytes"] for one in found["modules"].values())
    assert found["report"]["version"] == half["report"]["version"]


def test_a_gguf_base(tmp_path: Path) -> None:
    source = Path(__file__).parent / "fixtures" / "gguf-models" / "qwen3.gguf"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]})
    )
    generator = np.random.default_rng(3)
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {
        f"{stem}.lora_A.weight": generator.normal(size=(3, 64)),
        f"{stem}.lora_B.weight": generator.normal(size=(128, 3)),
    }
    save_file({key: value.astype("f4") for key, value in tensors.items()}, adapter / "adapter_model.safetensors")
    found = inspect_adapter(adapter, source)
    assert (found["accepted"], found["target_modules"], found["parameters"]) == (True, ["q_proj"], 3 * (64 + 128))
