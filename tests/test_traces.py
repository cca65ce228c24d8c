"""`record_trace`, `manylora sim replay` and `manylora sim calibrate`, from an engine to a fitted simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import ORACLE, MakeEngine, greedy, lora
from manylora import LLM
from manylora.cli import main
from manylora.exceptions import ValidationError

BASE = str(ORACLE / "llama" / "base")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred steps of base and adapters, with more adapters than slots."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    llm = LLM(BASE, record_trace=path, kv_cache_memory_bytes=4 << 20, max_model_len=128, num_threads=1, dtype="float32",
              enable_lora=True, max_lora_rank=64, max_loras=1, max_cpu_loras=2, use_tqdm_on_load=False)  # fmt: skip
    loras = [None, lora("alpha", 1), lora("beta", 2), lora("rank5", 3)]
    for turn in range(12):
        prompts = [[5 + turn + place for place in range(4 + 3 * number)] for number in range(4)]
        turned = [loras[(turn + number) % 4] for number in range(4)]
        llm.generate(prompts, greedy(12 + turn), use_tqdm=False, lora_request=turned)
    llm.llm_engine.core.close()
    return path


def test_a_trace_is_replayed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "replay", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("the same decisions: ")
    assert main(["sim", "replay", "--json", str(trace)]) == 0
    replayed = json.loads(capsys.readouterr().out)["replayed"]
    assert (replayed["requests"], replayed["closed"], replayed["lost"], replayed["unfinished"]) == (48, True, 0, 0)
    assert replayed["evictions"] > 0
    assert replayed["misses"] > 0


def test_a_calibration_is_fitted_and_predicts(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cal.json"
    assert main(["sim", "calibrate", str(trace), "-o", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "fitted/measured" in shown
    assert "steps: decode, adapters" in shown
    fitted = json.loads(output.read_text())
    assert (fitted["format"], fitted["version"]) == ("manylora-calibration", 1)
    measured = sum(one["seconds"] for one in fitted["fit"]["steps"].values())
    in_all = sum(one["seconds"] * one["fitted_over_measured"] for one in fitted["fit"]["steps"].values())
    assert in_all == pytest.approx(measured, rel=1e-6)
    assert main(["sim", "replay", str(trace), "--calibration", str(output)]) == 0
    assert "simulated/measured" in capsys.readouterr().out
    assert main(["sim", "replay", str(trace), "--calibration", str(output), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["measured"]["requests"] == answer["simulated"]["requests"] == 48
    assert answer["simulated"]["seconds"] > 0


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["replay", "missing.jsonl"], "trace `missing.jsonl` cannot be read"),
        (["replay", "plain.jsonl"], "`plain.jsonl`, trace line 1"),
        (["replay", "good.jsonl", "--calibration", "missing.json"], "calibration `missing.json` cannot be read"),
        (["replay", "good.jsonl", "--calibration", "plain.jsonl"], "calibration `"),
        (["calibrate", "plain.jsonl", "-o", "out.json"], "`plain.jsonl`, trace line 1"),
        (["calibrate", "good.jsonl", "-o", "missing/out.json"], "calibration `missing/out.json` cannot be written"),
        (["calibrate", "short.jsonl", "-o", "out.json"], "steps of the traces `0`: at least 200 are needed"),
    ],
)
def test_what_is_wrong_is_told(
    command: list[str], told: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    text = trace.read_text()
    Path("good.jsonl").write_text(text)
    Path("short.jsonl").write_text(text.split("\n")[0] + "\n")
    Path("plain.jsonl").write_text('{"arrival": 0, "prompt_tokens": 5, "output_tokens": 3}\n')
    assert main(["sim", *command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manylora: error: ")
    assert told in line
    assert not Path("out.json").exists()


def test_a_trace_goes_to_a_new_file(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    with pytest.raises(ValidationError, match="it is there already"):
        make_engine(record_trace=path)
    assert path.read_text() == "mine"
    with pytest.raises(ValidationError, match="its folder does not exist"):
        make_engine(record_trace=tmp_path / "missing" / "trace.jsonl")
