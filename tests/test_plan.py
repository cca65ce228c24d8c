"""`manylora plan` and `manylora.plan`: the engine's bytes, typed; errors that name the argument; pictures."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

import manylora
from conftest import ORACLE, MakeEngine
from manylora.cli import main
from manylora.planning import ENGINE_ARGUMENTS

CARD = ["plan", "--model", "Qwen2.5-7B-Instruct", "--gpu", "rtx4090", "--adapters", "30"]


def test_the_published_figures() -> None:
    answer = manylora.plan("Qwen2.5-7B-Instruct", gpu="rtx4090", adapters=30, rank=16, lengths=[1024, 4096])
    assert round(2 * answer.parameters / 1e9, 2) == 15.23
    assert round(answer.fleet[0].bytes / 1e6, 1) == 20.2
    assert round(answer.fleet_bytes / 1e9, 2) == 0.61
    assert round(answer.full_copies.bytes / 1e9) == 457
    assert [one.tokens for one in answer.sequences] == [1024, 4096]
    bytes_ = answer.bytes
    parts = (bytes_.driver, bytes_.base, bytes_.workspace, bytes_.adapters, bytes_.kv_blocks, bytes_.rest)
    assert sum(parts) == bytes_.budget
    assert bytes_.budget + bytes_.unused == bytes_.total


@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3"])
def test_an_engine_says_the_same(make_engine: MakeEngine, base: str) -> None:
    """A-55: with only max_loras given, too."""
    memory = 8 << 20
    llm = make_engine(base, max_loras=3, kv_cache_memory_bytes=memory, dtype="auto", max_lora_rank=16)
    info = llm._core.info()
    answer = manylora.plan(str(ORACLE / base / "base"), gpu="cpu", max_loras=3, kv_cache_memory_bytes=memory)
    assert (answer.bytes.base, answer.bytes.workspace) == (info.weight_bytes, info.working_bytes)
    assert (answer.ledger_bytes, answer.block_bytes) == (info.ledger_bytes, info.block_bytes)
    assert (answer.total_blocks, answer.max_model_len) == (info.kv_blocks, info.max_model_len)


def test_several_ranks_are_taken_in_turn() -> None:
    answer = manylora.plan("Llama-2-7b", gpu="a100-80", adapters=10, rank=[64, 32, 16], max_lora_rank=64)
    assert [(group.rank, group.count) for group in answer.fleet] == [(64, 4), (32, 3), (16, 3)]


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "torch_dtype": "float16",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    built_in = manylora.plan("Llama-2-7b", gpu="a10g").to_dict()
    for model in (path, tmp_path):
        read = manylora.plan(str(model), gpu="a10g").to_dict()
        assert read | {"model": ""} == built_in | {"model": ""}
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    path.write_text(json.dumps(config | {"quantization_config": quantization}))
    packed = manylora.plan(str(path), gpu="a10g")
    assert packed.quantization is not None
    assert packed.quantization.scheme == "AWQ 4-bit"
    assert packed.quantization.packed_bytes < packed.quantization.loaded_bytes / 3
    path.write_text("{")
    with pytest.raises(manylora.ManyLoRAError, match=r"config\.json"):
        manylora.plan(str(path), gpu="a10g")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "gtx9"}, "gpu `gtx9`: no such card"),
        ({"model": "gpt-5"}, "model `gpt-5`: no such model"),
        ({"model": ""}, "model must be"),
        ({"adapters": -1}, "adapters must be"),
        ({"adapters": True}, "adapters must be"),
        ({"rank": 64, "adapters": 1}, "rank `64`: an engine with max_lora_rank `16`"),
        ({"rank": []}, "rank must be"),
        ({"target_modules": "router", "adapters": 1}, "target_modules `router`"),
        ({"lengths": 0}, "lengths must be"),
        ({"lengths": 10**6}, "lengths `1000000`"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras `2`"),
        ({"dtype": "float32"}, "dtype `float32`"),
        ({"max_lora": 4}, "no argument `max_lora`"),
        ({"memory_bytes": 1 << 30}, "gpu_memory_utilization"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"model": "Qwen2.5-7B-Instruct", "gpu": "rtx4090"} | arguments
    with pytest.raises(manylora.ManyLoRAError) as caught:
        manylora.plan(**given)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_command_draws_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CARD, "--lengths", "1024", "--max-lora-rank", "256"]) == 0
    shown = capsys.readouterr().out
    bar = next(line for line in shown.splitlines() if line.startswith("["))
    assert len(bar) == 66
    answer = manylora.plan("Qwen2.5-7B-Instruct", gpu="rtx4090", adapters=30, lengths=1024, max_lora_rank=256)
    # A column is a 64th of the card.
    for letter, part in (("#", answer.bytes.base), ("=", answer.bytes.kv_blocks)):
        assert abs(bar.count(letter) - 64 * part / answer.bytes.total) <= 2
    assert bar.count("A") >= 1
    assert "base weights      15.23 GB" in shown
    assert "reserved by max_lora_rank 256 for 30 adapters, as other engines do: 38.76 GB" in shown
    assert "30 full fine-tunes: 456.94 GB" in shown


def test_the_command_prints_json_and_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CARD, "--json", "--max-loras", "4", "--hot-adapters", "8"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (
        answer
        == manylora.plan("Qwen2.5-7B-Instruct", gpu="rtx4090", adapters=30, max_loras=4, hot_adapters=8).to_dict()
    )
    assert answer["warnings"][0].startswith("max_loras `4` lets 4 adapters share a step")


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert main([*CARD, "--plot", str(path)]) == 0
    picture = xml.etree.ElementTree.parse(path).getroot()
    widths = [float(one.get("width", 0)) for one in picture if one.get("height") == "56"]
    assert abs(sum(widths) - 680) < 0.1
    assert "30 adapters on rtx4090" in path.read_text()
    for wrong, message in (("plan.pdf", "must end in .svg or .png"), ("none/plan.svg", "there is no folder")):
        assert main([*CARD, "--plot", str(tmp_path / wrong)]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*CARD, "--plot", str(tmp_path / "plan.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_every_engine_argument_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in ENGINE_ARGUMENTS:
        assert f"--{name.replace('_', '-')}" in shown
