"""`device=...`: what is said where there is no card, and what the engine tells of where it computes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ORACLE, MakeEngine
from manylora import LLM, SamplingParams
from manylora.exceptions import ManyLoRAError, ValidationError
from manylora.lora.request import LoRARequest

BASE = str(ORACLE / "llama" / "base")

no_driver = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")


@no_driver
def test_without_a_driver_a_card_is_refused_with_what_is_needed() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ManyLoRAError, match=r"no NVIDIA driver: .*libcuda\.so\.1.*install the driver.*\"cpu\""):
            LLM(BASE, device=device, use_tqdm_on_load=False)


@no_driver
def test_auto_takes_the_processor_and_says_why(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="manylora")
    llm = make_engine(device="auto")
    info = llm.llm_engine.core.info()
    assert info.device == "cpu"
    assert info.device_reason.startswith("device auto: cpu, because no NVIDIA driver")
    (record,) = [record for record in caplog.records if "device auto" in record.getMessage()]
    # Where there is no card nobody has to be warned.
    assert record.levelno == logging.INFO
    assert llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_processor_that_was_asked_for_needs_no_reason(make_engine: MakeEngine) -> None:
    info = make_engine(device="cpu").llm_engine.core.info()
    assert (info.device, info.device_reason) == ("cpu", None)
    # What only cards look at is accepted in silence.
    make_engine(
        device="cpu", gpu_memory_utilization=0.5, batch_invariant=True, fixed_gemm_algorithm=True, enforce_eager=True
    )


def test_torch_devices_are_known_by_name() -> None:
    class Device:
        def __str__(self) -> str:
            return "cuda:1"

    with pytest.raises(ManyLoRAError, match=r"cuda|NVIDIA"):
        LLM(BASE, device=Device(), use_tqdm_on_load=False)
    with pytest.raises(ValidationError, match="device must be auto, cpu, cuda"):
        LLM(BASE, device="tpu")


def test_a_driver_that_cannot_be_loaded_is_named() -> None:
    program = """
import sys
from manylora import LLM
try:
    LLM(sys.argv[1], device="cuda")
except Exception as error:
    print(error)
"""
    environment = os.environ | {"MANYLORA_CUDA_LIBRARY": "/no/such/libcuda.so"}
    run = subprocess.run(
        [sys.executable, "-c", program, BASE], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert "`/no/such/libcuda.so` (from `MANYLORA_CUDA_LIBRARY`) could not be loaded" in run.stdout


def emulated_device() -> Path | None:
    """Where the stand-ins for the driver and cuBLASLt are that `make test-cuda` builds, if it has."""
    folder = Path(os.environ.get("MANYLORA_EMULATOR_FOLDER") or "/nonexistent")
    return folder if (folder / "libcublasLt.so").is_file() else None


@pytest.mark.skipif(emulated_device() is None, reason="MANYLORA_EMULATOR_FOLDER names no emulated device")
def test_auto_takes_the_card_where_there_is_one(make_engine: MakeEngine) -> None:
    program = """
import json, sys
from manylora import LLM, SamplingParams
from manylora.lora.request import LoRARequest

base, adapter = sys.argv[1:]
llm = LLM(base, device="auto", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, enable_lora=True,
          use_tqdm_on_load=False)
info = llm.llm_engine.core.info()
lora = [None, LoRARequest("alpha", 1, adapter)]
prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
outputs = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False, lora_request=lora)
tokens = [list(output.outputs[0].token_ids) for output in outputs]
print(json.dumps([info.device, info.device_reason, tokens]))
"""
    folder, adapter = emulated_device(), str(ORACLE / "llama" / "adapters" / "alpha")
    libraries = {
        "MANYLORA_CUDA_LIBRARY": f"{folder}/libcuda.so",
        "MANYLORA_CUBLASLT_LIBRARY": f"{folder}/libcublasLt.so",
    }
    run = subprocess.run(
        [sys.executable, "-c", program, BASE, adapter],
        env=os.environ | libraries,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    device, reason, tokens = json.loads(run.stdout)
    if "holds no CUDA kernels" in reason:
        pytest.skip(reason)
    assert (device, reason) == ("cuda:0", "device auto: cuda:0 can be used")
    # The margins of these tokens are wider than what bfloat16 blurs.
    llm = make_engine(device="cpu", dtype="bfloat16", enable_lora=True)
    lora = [None, LoRARequest("alpha", 1, adapter)]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params, use_tqdm=False, lora_request=lora)
    assert tokens == [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens[0] != tokens[1]
