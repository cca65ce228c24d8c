"""`manylora sim` and `manylora.sim`: tables, JSON, pictures, arrays; what is wrong is one line and status 2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml

import manylora
from manylora.cli import main

RUN: dict[str, Any] = {
    "model": "SmolLM2-135M",
    "gpu": "l4",
    "adapters": 20,
    "rank": [8, 16],
    "engine": {
        "max_loras": 4, "max_cpu_loras": 6, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000,
        "max_model_len": 1024,
    },
    "workload": {"synthetic": {"rate": 20.0, "duration": 10.0, "input": "16:200", "output": "4:60"}},
    "slo": {"ttft": 0.1},
}  # fmt: skip
FLAGS = ["sim", "--model", "SmolLM2-135M", "--gpu", "l4", "--adapters", "20", "--rate", "20", "--duration", "5"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    assert main([*flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_arrays_agree_with_the_summary(file: str) -> None:
    told: list[tuple[int, int]] = []
    result = manylora.sim.run(RUN, progress=lambda done, total: told.append((done, total)))
    requests, summary = result["requests"], result["summary"]
    count = summary["requests"]
    assert told[-1] == (count, count)
    assert all(isinstance(column, numpy.ndarray) and len(column) == count for column in requests.values())
    assert numpy.all(numpy.diff(requests["arrival"]) >= 0)
    assert numpy.all(requests["first_token"] > requests["admitted"])
    assert numpy.all(requests["end"] >= requests["first_token"])
    ttft = requests["first_token"] - requests["arrival"]
    assert abs(summary["ttft"]["mean"] - ttft.mean()) < 1e-9
    assert summary["slo_attainment"] == (ttft <= 0.1).mean()
    assert requests["output_tokens"].sum() == summary["output_tokens"] == result["adapters"]["output_tokens"].sum()
    for adapter, completed in zip(result["adapters"]["adapter"], result["adapters"]["completed"], strict=True):
        assert completed == (requests["adapter"] == adapter).sum()
    assert result["replicas"]["requests"].tolist() == [count]
    # A file is the same, and so is a second time.
    again = manylora.sim.run(file)
    assert again["summary"] == summary
    numpy.testing.assert_array_equal(again["requests"]["end"], requests["end"])
    shown = manylora.sim.summary(RUN)
    assert {name: shown[name] for name in summary} == summary
    requests["end"][0] = 0.0  # They are the caller's.


def test_a_model_by_its_files(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert manylora.sim.summary(RUN | {"model": str(tmp_path)}) == manylora.sim.summary(RUN)


def test_flags_are_the_files_fields(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    by_file = answer(capsys, "sim", "--config", file)
    by_flags = answer(
        capsys, "sim", "--model", "SmolLM2-135M", "--gpu", "l4", "--adapters", "20", "--rank", "8,16",
        "--max-loras", "4", "--max-cpu-loras", "6", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "100m",
        "--max-model-len", "1024", "--rate", "20", "--duration", "10", "--input", "16:200", "--output", "4:60",
        "--slo-ttft", "0.1",
    )  # fmt: skip
    assert by_file == by_flags == manylora.sim.summary(RUN)
    changed = answer(capsys, "sim", "--config", file, "--max-cpu-loras", "none", "--set", "host_seconds=0.01")
    assert changed["shelf"]["evictions"] < by_file["shelf"]["evictions"]
    assert changed["itl"]["p50"] > by_file["itl"]["p50"] + 0.005
    whole = answer(capsys, "sim", "--config", file, "--show-config")
    assert manylora.sim.summary(whole) == by_file


def test_the_table(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--config", file, "--replicas", "3", "--router", "least_loaded"]) == 0
    shown, bar = capfd.readouterr()
    assert bar == "", "a progress bar where there is no terminal"
    for words in ("Requests/s", "TTFT (ms)", "ITL (ms)", "p99", "SLO attained", "ttft <= 0.1 s", "Jain's index",
                  "Evictions / preemptions", "replica", "Largest over mean"):  # fmt: skip
        assert words in shown


def test_sweeps(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "sim", "--config", file, "--sweep", "max_cpu_loras=4,8,20", "--sweep", "rate=10:30:10")
    assert [tuple(row["parameters"].values()) for row in rows[:4]] == [(4, 10), (4, 20), (4, 30), (8, 10)]
    assert rows == manylora.sim.sweep(RUN, {"max_cpu_loras": [4, 8, 20], "rate": [10, 20, 30]})
    alone = manylora.sim.summary(RUN | {"engine": RUN["engine"] | {"max_cpu_loras": 8}})
    row = next(row for row in rows if row["parameters"] == {"max_cpu_loras": 8, "rate": 20})
    assert row["metrics"]["ttft_p99"] == alone["ttft"]["p99"]
    assert row["metrics"]["hit_rate"] == alone["hit_rate"]
    for sweep in (["max_cpu_loras=4:10:2"], ["scheduling_policy=fair,fcfs"], ["max_cpu_loras=4,8", "rate=10,20,30"]):
        flags = [flag for one in sweep for flag in ("--sweep", one)]
        for ending in ("svg", "html"):
            path = tmp_path / f"sweep.{ending}"
            assert main(["sim", "--config", file, *flags, "--plot", str(path)]) == 0
            text = path.read_text()
            assert "Adapter hit rate" in text
            if ending == "svg":
                xml.etree.ElementTree.fromstring(text)
    shown = capsys.readouterr().out
    assert "TTFT p99 ms" in shown
    assert "fcfs" in shown


def test_searches(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.svg"
    flags = ["sim", "--config", file, "--find-smallest", "max_cpu_loras=4:20", "--such-that", "hit_rate >= 0.7"]
    found = answer(capsys, *flags, "--plot", str(path))
    assert found["beyond"] == found["value"] - 1
    assert found == manylora.sim.find(RUN, "max_cpu_loras", 4, 20, "hit_rate >= 0.7")
    assert [one["holds"] for one in found["trials"]] == [one["metrics"]["hit_rate"] >= 0.7 for one in found["trials"]]
    xml.etree.ElementTree.parse(path)
    assert main(flags) == 0
    assert f"max_cpu_loras={found['value']}: hit_rate >= 0.7 holds" in capsys.readouterr().out
    knee = answer(capsys, "sim", "--config", file, "--find-rate", "1:2000:0.1", "--attainment", "0.9")
    assert knee["conditions"] == ["slo_attainment >= 0.9"]
    assert 1 < knee["value"] < knee["beyond"] < 2000
    assert main(["sim", "--config", file, "--find-largest", "rate=900:999", "--such-that", "ttft_p99 < 0.001"]) == 1
    assert "nowhere in this range" in capsys.readouterr().out


def test_pictures_of_a_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.svg"
    assert main(["sim", "--config", file, "--replicas", "2", "--plot", str(path)]) == 0
    picture = xml.etree.ElementTree.parse(path).getroot()
    text = path.read_text()
    assert text.count("<polyline") == 4
    assert "SmolLM2-135M on 2 x l4" in text
    assert picture.get("width") == "968"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--gpu is needed"),
        (["--gpu", "gtx9"], "gpu `gtx9`: no such card"),
        (["--gpu", "l4", "--rate", "fast"], "workload.synthetic.rate `fast`"),
        (["--gpu", "l4", "--rate", "0"], "rate `0"),
        (["--gpu", "l4", "--rate", "nan"], "workload.synthetic.rate `nan`"),
        (["--gpu", "l4", "--rate", "NaN"], "a finite number is needed, got `NaN`"),
        (["--gpu", "l4", "--max-loras", "0"], "max_loras `0`"),
        (["--gpu", "l4", "--max-loras", "4", "--max-cpu-loras", "2"], "max_cpu_loras `2`"),
        (["--gpu", "l4", "--scheduling-policy", "lifo"], "engine.scheduling_policy `lifo`"),
        (["--gpu", "l4", "--router", "dns"], "router `dns`"),
        (["--gpu", "l4", "--alpha", "1"], "parameter `alpha`: there is none"),
        (["--gpu", "l4", "--set", "slots=3"], "parameter `slots`: there is none"),
        (["--gpu", "l4", "--set", "slots"], "NAME=VALUE is needed, got `slots`"),
        (["--gpu", "l4", "--sweep", "rate=3:1:1"], "`3:1:1` is no range"),
        (["--gpu", "l4", "--sweep", "rate=1,,2"], "has an empty value"),
        (["--gpu", "l4", "--sweep", "rate=1,-2"], "at rate=-2: rate `-2`"),
        (["--gpu", "l4", "--sweep", "rate=1", "--sweep", "rate=2"], "--sweep `rate`: it is swept twice"),
        (["--gpu", "l4", "--sweep", "rate=1", "--find-rate", "1:2"], "one question at a time"),
        (["--gpu", "l4", "--such-that", "ttft_p99 < 1"], "--such-that belongs to"),
        (["--gpu", "l4", "--find-rate", "5:1"], "range `5:1`"),
        (["--gpu", "l4", "--find-rate", "few"], "NAME=LOW:HIGH"),
        (["--gpu", "l4", "--find-rate", "1:2", "--such-that", "speed > 1"], "condition `speed`: no such metric"),
        (["--gpu", "l4", "--trace", "/no/such.jsonl"], "path `/no/such.jsonl`: it cannot be read"),
        (["--gpu", "l4", "--workload", "trace"], "missing field `path`"),
        (["--gpu", "l4", "--workload", "poisson"], "invalid choice: 'poisson'"),
        (["--gpu", "l4", "--config", "/no/such.yaml"], "config `/no/such.yaml` cannot be read"),
        (["--gpu", "l4", "--plot", "run.pdf"], "--plot `run.pdf` must end in"),
        (["--gpu", "l4", "--slots", "3"], "there is no flag --slots"),
        (["--gpu", "l4", "--sweep", "a=1", "--sweep", "b=1", "--sweep", "c=1", "--plot", "x.svg"], "--plot shows"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["sim", "--model", "SmolLM2-135M", *flags])
    except SystemExit as ended:
        # What the parser itself finds.
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.splitlines()) == 1
    assert message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: [", "cannot be read"),
        ("- 1", "must hold a table"),
        ("{model: SmolLM2-135M, gpu: l4, engine: {max_lora: 3}}", "unknown field `max_lora`"),
        ("{model: SmolLM2-135M, gpu: l4, seed: -1}", "seed `-1`"),
        ("{model: SmolLM2-135M, gpu: l4, rank: .nan}", "neither number"),
    ],
)
def test_wrong_files_name_the_field(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(manylora.ValidationError) as caught:
        manylora.sim.run(path)
    assert message in str(caught.value)


def test_numpy_is_needed_for_arrays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(manylora.ValidationError, match=r"manylora\[sim\]"):
        manylora.sim.run(RUN)
    assert manylora.sim.summary(RUN)["requests"] == 200


def test_other_threads_run_and_errors_of_progress_come_through() -> None:
    beats: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.005):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    long = RUN | {"workload": {"synthetic": {"rate": 20.0, "duration": 100.0}}}
    manylora.sim.summary(long)
    stop.set()
    thread.join()
    assert len(beats) > 2, "the GIL was held"

    def progress(_: int, __: int) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        manylora.sim.summary(long, progress=progress)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_a_run_at_once() -> None:
    code = "from manylora.cli import main; import sys; print('ready', flush=True); sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, *FLAGS, "--duration", "10000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == "ready\n"
        time.sleep(1)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=30) == 130
        assert "interrupted" in running.stderr.read()
