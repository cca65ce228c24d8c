"""Every argument of vLLM's `LLM(...)`: honoured, without effect with one warning, or refused with the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from conftest import ORACLE, MakeEngine, lora
from manylora import LLM, AdapterError, ValidationError, arguments
from manylora.arguments import ARGUMENTS, BY_NAME, Argument, Kind, Treatment
from manylora.engine_args import Settings

BASE = str(ORACLE / "llama" / "base")


def of(treatment: Treatment) -> list[Argument]:
    return [argument for argument in ARGUMENTS if argument.treatment is treatment]


def other_value(argument: Argument) -> Any:
    """A value that is not the default, of a type that fits."""
    default = argument.default
    for value in (not default,) if isinstance(default, bool) else ("something", {"key": 1}, 17, 3.5):
        if not argument.is_default(value):
            return value
    raise AssertionError(argument)


def name_of(argument: Argument) -> str:
    return argument.name


def test_the_table_names_each_argument_once_and_gives_reasons() -> None:
    assert len(BY_NAME) == len(ARGUMENTS)
    assert len(ARGUMENTS) > 200
    assert all(len(argument.note) > 4 for argument in ARGUMENTS)
    # Those that users of LoRA meet first.
    expected = {
        "enable_lora": Treatment.HONOURED, "max_loras": Treatment.HONOURED, "max_cpu_loras": Treatment.HONOURED,
        "tensor_parallel_size": Treatment.REFUSED, "fully_sharded_loras": Treatment.REFUSED,
        "lora_dtype": Treatment.WITHOUT_EFFECT, "gpu_memory_utilization": Treatment.HONOURED,
    }  # fmt: skip
    assert {name: BY_NAME[name].treatment for name in expected} == expected


@pytest.mark.parametrize("argument", of(Treatment.REFUSED), ids=name_of)
def test_a_refused_argument_raises_with_its_reason(argument: Argument) -> None:
    with pytest.raises(ValidationError) as refusal:
        Settings(model=BASE, **{argument.name: other_value(argument)})
    assert str(refusal.value).startswith(f"{argument.name}=")
    assert argument.note in str(refusal.value)


@pytest.mark.parametrize("argument", of(Treatment.WITHOUT_EFFECT), ids=name_of)
def test_an_argument_without_effect_warns_once(argument: Argument, caplog: pytest.LogCaptureFixture) -> None:
    Settings(model=BASE, **{argument.name: other_value(argument)})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{argument.name}=")
    assert record.getMessage().endswith(argument.note)


def test_defaults_and_none_are_always_accepted_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    for argument in ARGUMENTS:
        for value in (None, argument.default, *argument.same):
            if argument.name != "model":
                Settings(model=BASE, **{argument.name: value})
    given = {argument.name: argument.default for argument in ARGUMENTS if argument.name != "model"}
    Settings(model=BASE, **given)
    assert caplog.records == []


# For every honoured argument: a value, and how it shows.
HONOURED: dict[str, tuple[Any, str, Any]] = {
    "model": (BASE, "model", BASE),
    "tokenizer": (Path(BASE), "tokenizer", BASE),
    "skip_tokenizer_init": (True, "skip_tokenizer_init", True),
    "served_model_name": ("name", "model_names", [BASE, "name"]),
    "chat_template": ("{{ messages }}", "chat_template", "{{ messages }}"),
    "device": ("cuda:1", "device", "cuda:1"),
    "dtype": ("float32", "dtype", "float32"),
    "seed": (7, "seed", 7),
    "max_model_len": (100, "max_model_len", 100),
    "max_logprobs": (-1, "max_logprobs", -1),
    "logprobs_mode": ("raw_logits", "logprobs_mode", "raw_logits"),
    "max_num_seqs": (5, "max_num_seqs", 5),
    "max_num_batched_tokens": (6, "max_num_batched_tokens", 6),
    "block_size": (8, "block_size", 8),
    "kv_cache_memory_bytes": (1 << 22, "kv_cache_memory_bytes", 1 << 22),
    "gpu_memory_utilization": (0.5, "gpu_memory_utilization", 0.5),
    "enforce_eager": (True, "enforce_eager", True),
    "batch_invariant": (True, "batch_invariant", True),
    "fixed_gemm_algorithm": (True, "fixed_gemm_algorithm", True),
    "enable_prefix_caching": (False, "enable_prefix_caching", False),
    "enable_chunked_prefill": (False, "enable_chunked_prefill", False),
    "scheduling_policy": ("priority", "scheduling_policy", "priority"),
    "num_threads": (1, "num_threads", 1),
    "pin_threads": (True, "pin_threads", True),
    "enable_lora": (True, "enable_lora", True),
    "max_lora_rank": (9, "max_lora_rank", 9),
    "max_loras": (3, "max_loras", 3),
    "max_cpu_loras": (4, "max_cpu_loras", 4),
    "lora_target_modules": ("q_proj", "lora_target_modules", ["q_proj"]),
    "lora_eviction": ("cost_aware", "lora_eviction", "cost_aware"),
    "loader_threads": (3, "loader_threads", 3),
    "max_deferred_steps": (9, "max_deferred_steps", 9),
    "lora_memory_bytes": (1 << 20, "lora_memory_bytes", 1 << 20),
    "strict_base": (True, "strict_base", True),
    "record_trace": (Path("/x/trace.jsonl"), "record_trace", "/x/trace.jsonl"),
}
# Those that the Python side honours itself, each with a test of its own.
IN_PYTHON = {"revision", "tokenizer_revision", "hf_token", "download_dir", "generation_config", "use_tqdm_on_load",
             "disable_log_stats", "lora_root", "lora_cache_bytes"}  # fmt: skip


def test_every_honoured_argument_is_in_one_of_the_two_lists() -> None:
    assert {argument.name for argument in of(Treatment.HONOURED)} == set(HONOURED) | IN_PYTHON


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_argument_reaches_the_engine(name: str) -> None:
    value, key, expected = HONOURED[name]
    settings = Settings(**({"model": BASE} | {name: value}))
    assert settings.native()[key] == expected
    assert key == "model" or Settings(model=BASE).native()[key] != expected


@pytest.mark.parametrize("argument", of(Treatment.HONOURED), ids=name_of)
def test_an_honoured_argument_refuses_values_of_another_kind(argument: Argument) -> None:
    wrong: dict[Kind, list[Any]] = {
        Kind.TEXT: ["", 5, ["a"]],
        Kind.PATH: ["", 5, ["a"]],
        Kind.PATHS: ["", 5, [], [5]],
        Kind.NAMES: ["", 5, [], [5]],
        Kind.SWITCH: ["yes", 2, 0.5],
        Kind.COUNT: [0, -7, "many", 1.5, True, 2**63],
        Kind.WHOLE: [-1, "many", 1.5, True, 2**63],
        Kind.LIMIT: [-2, "many", 1.5, True, 2**63],
        Kind.TOKEN: [5, ["a"]],
        Kind.SHARE: [0, -0.5, 1.01, True, "half", float("nan")],
        Kind.DTYPE: ["int8", 5, ""],
        Kind.DEVICE: ["gpu", "cuda:", "cuda:-1", "cuda:x", 0, ""],
    }
    for value in wrong[argument.kind]:
        with pytest.raises(ValidationError, match=f"{argument.name} must be "):
            Settings(**({"model": BASE} | {argument.name: value}))
    for choice in argument.choices:
        Settings(model=BASE, **{argument.name: choice})
    if argument.choices:
        with pytest.raises(ValidationError, match=" or ".join(argument.choices)):
            Settings(model=BASE, **{argument.name: "something"})


def test_an_unknown_argument_is_named_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match=r"no argument `max_lora`; did you mean `max_loras`\?$"):
        LLM(BASE, max_lora=2)
    with pytest.raises(ValidationError, match=r"no argument `zzz`$"):
        LLM(BASE, zzz=2)


def test_torch_dtypes_are_known_by_name() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert Settings(model=BASE, dtype=Dtype()).native()["dtype"] == "bfloat16"


def test_the_engine_runs_with_what_it_is_told(make_engine: MakeEngine, capfd, caplog) -> None:
    caplog.set_level(logging.INFO, logger="manylora")
    llm = make_engine(block_size=8, max_model_len=64, dtype="bfloat16", num_threads=1, use_tqdm_on_load=True,
                      disable_log_stats=False)  # fmt: skip
    info = llm.llm_engine.core.info()
    assert (info.block_size, info.max_model_len, info.vocab_size) == (8, 64, 288)
    assert info.dtype == "bfloat16"
    assert "1 thread" in info.backend
    assert "Loading model" in capfd.readouterr().err
    llm.close()
    assert any("engine counters" in record.getMessage() for record in caplog.records)


def test_max_model_len_is_lowered_or_refused_with_numbers(make_engine: MakeEngine, caplog) -> None:
    caplog.set_level(logging.INFO, logger="manylora")
    block = make_engine().llm_engine.core.info().block_bytes
    llm = make_engine(kv_cache_memory_bytes=12 * block, enable_lora=False)
    assert llm.llm_engine.core.info().max_model_len == 12 * 16
    (line,) = [record.getMessage() for record in caplog.records if "lowered" in record.getMessage()]
    assert "512" in line
    assert "192" in line
    with pytest.raises(ValidationError, match=r"(?s)max_model_len `512`.*192"):
        make_engine(kv_cache_memory_bytes=12 * block, enable_lora=False, max_model_len=512)
    with pytest.raises(ValidationError, match=r"max_model_len `513`.*512"):
        make_engine(max_model_len=513)


def test_lora_memory_bytes_bounds_what_is_resident(make_engine: MakeEngine) -> None:
    sizes = make_engine()
    sizes.llm_engine.add_lora(lora("alpha", 1))
    one = sizes.llm_engine.stats()["adapter_bytes"]
    llm = make_engine(lora_memory_bytes=2 * one + 100)
    for number, name in enumerate(("alpha", "beta", "gamma", "sub-q"), start=1):
        llm.llm_engine.add_lora(lora(name, number))
        assert llm.llm_engine.stats()["adapter_bytes"] <= 2 * one + 100
    with pytest.raises(AdapterError):
        make_engine(lora_memory_bytes=100).llm_engine.add_lora(lora("alpha", 1))


def test_from_engine_args_takes_a_mapping_or_an_object() -> None:
    class Arguments:
        def __init__(self) -> None:
            self.model, self.max_model_len, self.use_tqdm_on_load = BASE, 33, False
            self.kv_cache_memory_bytes = 1 << 22

    for given in (Arguments(), vars(Arguments())):
        with LLM.from_engine_args(given) as llm:
            assert llm.llm_engine.core.info().max_model_len == 33


def test_the_documented_table_is_the_one_that_is_applied() -> None:
    page = Path(__file__).parent.parent / "docs" / "llm-arguments.md"
    assert page.read_text() == arguments.markdown(), "write it again; its head says how"
