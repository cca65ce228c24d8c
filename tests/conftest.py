"""Fixtures of the end-to-end tests: engines on the oracle's tiny models, and adapters with content of their own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from manylora import LLM, SamplingParams
from manylora.lora.request import LoRARequest
from oracle.oracle_check import Oracle

# What a shell starts in the background ignores Ctrl-C, what nohup starts the end of a terminal; and so does
# all that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

ORACLE = Path(__file__).parent / "oracle"
BASES = sorted(path.parent.name for path in ORACLE.glob("*/base"))
MIB = 1 << 20
PROMPT = [5, 40, 99, 7, 130]
# Four blocks.
LONG_PROMPT = [3 + 5 * i % 280 for i in range(64)]

MakeEngine = Callable[..., LLM]


def adapter_path(name: str, base: str = "llama") -> str:
    return str(ORACLE / base / "adapters" / name)


def lora(name: str, number: int, base: str = "llama", scale: float = 1.0) -> LoRARequest:
    return LoRARequest(name, number, adapter_path(name, base), scale=scale)


def named(name: str, number: int, source: str) -> LoRARequest:
    """One of the oracle's adapters under another name."""
    return LoRARequest(name, number, adapter_path(source))


def greedy(max_tokens: int = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def logits_of(llm: LLM, tokens: list[int], adapter: str | None = None, scale: float = 1.0) -> np.ndarray:
    return np.from_dlpack(llm.llm_engine.core.logits(tokens, [(adapter, scale)] if adapter else []))


def answer(output: Any) -> list[tuple[Any, ...]]:
    """What must not depend on the batch, to the last bit."""
    return [
        (
            sample.token_ids,
            sample.text,
            sample.logprobs,
            sample.finish_reason,
            sample.stop_reason,
            output.prompt_logprobs,
        )
        for sample in output.outputs
    ]


def solo(llm: LLM, request: LoRARequest | None, count: int = 8) -> list[tuple[Any, ...]]:
    (output,) = llm.generate(PROMPT, greedy(count, logprobs=1), use_tqdm=False, lora_request=request)
    return answer(output)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines on oracle bases in float32; they are closed after the test."""
    engines: list[LLM] = []

    def make(base: str = "llama", **arguments: Any) -> LLM:
        defaults: dict[str, Any] = {
            # Whatever the machine has: what is expected was computed for a processor.
            "device": "cpu",
            "dtype": "float32",
            "enable_lora": True,
            "max_lora_rank": 64,
            "kv_cache_memory_bytes": 32 * MIB,
            "use_tqdm_on_load": False,
            # The name that the oracle's adapters give their base.
            "served_model_name": f"oracle/{base}",
        }
        path = base if os.sep in base else str(ORACLE / base / "base")
        engine = LLM(path, **(defaults | arguments))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def llm(make_engine: MakeEngine) -> LLM:
    """An engine on the base `llama`."""
    return make_engine()


@pytest.fixture
def expected(make_engine: MakeEngine) -> Callable[[str | None], list[tuple[Any, ...]]]:
    """What an adapter answers, alone in an engine that has room for all."""
    known: dict[str | None, list[tuple[Any, ...]]] = {}
    engine = make_engine()

    def get(name: str | None) -> list[tuple[Any, ...]]:
        if name not in known:
            known[name] = solo(engine, name and lora(name, 1 + len(known)))
        return known[name]

    return get


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., str]:
    """Make an adapter from one of the oracle's, with tensors and configuration changed."""

    def make(
        name: str,
        source: str = "small",
        seed: int | None = None,
        config: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
    ) -> str:
        target = tmp_path / name
        shutil.copytree(adapter_path(source), target)
        if config:
            file = target / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        if seed is not None or tensors:
            file = target / "adapter_model.safetensors"
            content = load_file(file)
            if seed is not None:
                noise = np.random.default_rng(seed)
                content = {
                    key: value + noise.normal(0, 0.1, value.shape).astype("f4") for key, value in content.items()
                }
            save_file(tensors(content) if tensors else content, file)
        return str(target)

    return make


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Oracle]:
    """Expected results of a base; read once."""
    read: dict[str, Oracle] = {}

    def get(base: str) -> Oracle:
        if base not in read:
            read[base] = Oracle(str(ORACLE / base))
        return read[base]

    return get


@pytest.fixture
def random_prompts() -> Callable[[int, int], list[list[int]]]:
    """Make prompts of random lengths up to a limit."""

    def make(count: int, longest: int, seed: int = 1) -> list[list[int]]:
        source = random.Random(seed)
        return [[source.randrange(3, 288) for _ in range(source.randint(1, longest))] for _ in range(count)]

    return make
