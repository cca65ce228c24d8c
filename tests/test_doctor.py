"""`manylora doctor`: what a report of a mistake needs, on any machine and without a model."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time

import pytest

import manylora
from manylora import _core
from manylora.cli import doctor, main


def run(*flags: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "manylora", "doctor", *flags], env=os.environ | environment, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_everything_is_in_it() -> None:
    found = json.loads(run("--json"))
    assert found["versions"]["manylora"] == manylora.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["packages"]["numpy"] is not None
    processors, memory = found["processors"], found["memory"]
    assert processors["simd"]["level"] == processors["simd"]["available"][-1]
    assert processors["simd"]["available"][0] == "portable"
    assert 1 <= processors["default_threads"] <= processors["physical_cores"] <= processors["logical"]
    assert processors["logical"] == len(os.sched_getaffinity(0))
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]
    assert found["cuda"]["built"] in (True, False)
    # A card, or a word why there is none.
    assert found["cuda"]["cards"] or found["cuda"]["notes"]
    for folder in found["folders"].values():
        assert folder["free_bytes"] > 0
    text = run()
    assert text.startswith(f"manylora       {manylora.__version__}, Python {platform.python_version()}")
    for word in ("SIMD level", "threads", "memory", "driver", "kernels", "cache", "environment"):
        assert f"\n{word}" in text


def test_variables_are_shown_and_secrets_are_not() -> None:
    secret = {
        "MANYLORA_API_KEY": "sesame",
        "HF_TOKEN": "sesame",
        "MANYLORA_ADMIN_PASSWORD": "sesame",
        "OPENAI_API_KEY": "sesame",
    }
    for flags in ([], ["--json"]):
        text = run(*flags, **secret, MANYLORA_LOG="warn", UNRELATED="open")
        assert "sesame" not in text
        assert "UNRELATED" not in text
        for name in secret:
            assert name in text
    environment = json.loads(run("--json", **secret, MANYLORA_LOG="warn"))["environment"]
    assert environment["MANYLORA_LOG"] == "warn"
    assert {environment[name] for name in secret} == {"(set, not shown)"}
    assert doctor.environment({"MANYLORA_API_KEY": ""}) == {"MANYLORA_API_KEY": ""}


def test_a_forced_level_is_told() -> None:
    simd = json.loads(run("--json", MANYLORA_SIMD="portable"))["processors"]["simd"]
    assert (simd["level"], simd["forced"], simd["variable"]) == ("portable", "portable", "MANYLORA_SIMD")
    text = run(MANYLORA_SIMD="sse9")
    assert "SIMD level     none of portable" in text
    assert "`sse9`" in text


def test_a_driver_that_is_none_is_told() -> None:
    cuda = json.loads(run("--json", MANYLORA_CUDA_LIBRARY="/nowhere/libcuda.so"))["cuda"]
    if cuda["built"]:
        assert any("/nowhere/libcuda.so" in note for note in cuda["notes"])
    assert (cuda["driver"], cuda["cards"]) == (None, [])


def test_the_emulated_device_is_a_card() -> None:
    folder = os.environ.get("MANYLORA_EMULATOR_FOLDER")
    if folder is None or not os.path.exists(f"{folder}/libcuda.so"):
        pytest.skip("the emulated device is not built")
    cuda = json.loads(run("--json", MANYLORA_CUDA_LIBRARY=f"{folder}/libcuda.so"))["cuda"]
    assert "emulated" in cuda["driver"]
    assert cuda["cards"][0]["ordinal"] == 0


def test_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """It uses no time worth mentioning, which is counted where others that run meanwhile do not matter."""
    begun = time.process_time()
    assert main(["doctor"]) == 0
    assert time.process_time() - begun < 1
    assert "SIMD level" in capsys.readouterr().out


def test_other_machines_have_a_report_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system does not tell is unknown, and nothing fails for it."""
    monkeypatch.setattr(doctor, "_HUGE_PAGES", doctor.Path("/nowhere"))
    machine = json.loads(_core.machine([])) | {
        "available_bytes": None,
        "cgroup_cpus": 1.5,
        "cgroup_memory_bytes": 3 << 30,
    }
    machine["cuda"] |= {
        "kernels": "sm_80 sm_90", "driver": "/lib/libcuda.so", "driver_version": "13.0",
        "cublaslt": "13.1.0 (/lib/x.so)",
        "cards": [{"ordinal": 0, "name": "Card", "capability": "9.0", "memory_bytes": 80 << 30}], "notes": [],
    }  # fmt: skip
    monkeypatch.setattr(_core, "machine", lambda folders: json.dumps(machine))
    text = "\n".join(doctor.lines(doctor.report()))
    for told in (
        "unknown can be had of", "cgroup: 3.0 GiB", "cgroup: 1.5 processors", "huge pages: unknown",
        "driver         /lib/libcuda.so, CUDA 13.0", "kernels        sm_80 sm_90", "cuBLASLt       13.1.0",
        "card           cuda:0: Card, capability 9.0, 80.0 GiB",
    ):  # fmt: skip
        assert told in text
