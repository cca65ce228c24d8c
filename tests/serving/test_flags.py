"""Every flag of `vllm serve`: honoured, without effect with one warning, or refused with the reason."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from manylora import serve_arguments
from manylora.arguments import Treatment
from manylora.cli import main
from manylora.cli.serve import Plan, add_flags, plan
from manylora.engine_args import Settings
from manylora.flags import FlagParser
from manylora.serve_arguments import BY_NAME, FLAGS, Flag, Form

from .conftest import ADAPTERS, ORACLE, StartServer

BASE = str(ORACLE / "llama" / "base")
# A base that is not there: what is said of flags is said before it is looked for.
NOWHERE = "/nowhere/at-all"


def of(treatment: Treatment) -> list[Flag]:
    return [flag for flag in FLAGS if flag.argument.treatment is treatment]


def name_of(flag: Flag) -> str:
    return flag.name


def parse(*given: str) -> argparse.Namespace:
    parser = FlagParser(prog="manylora serve")
    add_flags(parser)
    return parser.parse_args(list(given))


def planned(*given: str) -> Plan:
    return plan(parse(BASE, *given))


def set_to_another(flag: Flag) -> list[str]:
    """The flag as somebody would write it who wants something else than the default."""
    if flag.form is Form.SWITCH:
        return ["--no-" + flag.spelling[2:] if flag.argument.default is True else flag.spelling]
    value = next(text for text in ("something", '{"key": 1}', "17") if not flag.argument.is_default(text))
    return [flag.spelling, value]


def test_the_table_names_each_flag_once_and_gives_reasons() -> None:
    assert len(BY_NAME) == len(FLAGS) > 250
    assert all(len(flag.argument.note) > 4 for flag in FLAGS)
    expected = {
        "host": Treatment.HONOURED, "max_lora_rank": Treatment.HONOURED, "lora_modules": Treatment.HONOURED,
        "tensor_parallel_size": Treatment.REFUSED, "uds": Treatment.REFUSED, "middleware": Treatment.REFUSED,
        "disable_log_requests": Treatment.WITHOUT_EFFECT, "lora_dtype": Treatment.WITHOUT_EFFECT,
    }  # fmt: skip
    assert {name: BY_NAME[name].argument.treatment for name in expected} == expected


@pytest.mark.parametrize("flag", of(Treatment.REFUSED), ids=name_of)
def test_a_refused_flag_ends_the_start_with_its_reason(flag: Flag, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", BASE, "--port", "0", *set_to_another(flag)]) == 2
    told = capsys.readouterr().err
    assert flag.argument.note in told
    assert flag.spelling in told or f"{flag.name}=" in told


def can_be_set(flag: Flag) -> bool:
    """Whether some value differs from the default: both values of a switch may mean the same."""
    return flag.form is not Form.SWITCH or not (flag.argument.is_default(True) and flag.argument.is_default(False))


@pytest.mark.parametrize("flag", [*filter(can_be_set, of(Treatment.WITHOUT_EFFECT))], ids=name_of)
def test_a_flag_without_effect_warns_once(
    flag: Flag, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", NOWHERE, "--port", "0", *set_to_another(flag)]) == 2
    assert NOWHERE in capsys.readouterr().err
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "has no effect" in warning
    assert warning.endswith(flag.argument.note)


# For every flag that the server honours itself: how it is given, and how it shows.
SERVER: dict[str, tuple[list[str], str, Any]] = {
    "host": (["--host", "::1"], "host", "::1"),
    "port": (["--port", "81"], "port", 81),
    "root_path": (["--root-path", "/a/b"], "root_path", "/a/b"),
    "ssl_certfile": (["--ssl-certfile", "/x"], "ssl_certfile", "/x"),
    "ssl_keyfile": (["--ssl-keyfile", "/x"], "ssl_keyfile", "/x"),
    "ssl_ca_certs": (["--ssl-ca-certs", "/x"], "ssl_ca_certs", "/x"),
    "ssl_cert_reqs": (["--ssl-cert-reqs", "2"], "ssl_cert_reqs", 2),
    "enable_ssl_refresh": (["--enable-ssl-refresh"], "enable_ssl_refresh", True),
    "allowed_origins": (
        ["--allowed-origins", '["https://a", "https://b"]'],
        "allowed_origins",
        ["https://a", "https://b"],
    ),
    "allowed_methods": (["--allowed-methods", "GET", "POST"], "allowed_methods", ["GET", "POST"]),
    "allowed_headers": (["--allowed-headers", '["*"]'], "allowed_headers", ["*"]),
    "allow_credentials": (["--allow-credentials"], "allow_credentials", True),
    "disable_fastapi_docs": (["--disable-fastapi-docs"], "describe_routes", False),
    "disable_page": (["--disable-page"], "page", False),
    "max_body_bytes": (["--max-body-bytes", "1k"], "max_body_bytes", 1000),
    "max_pending": (["--max-pending", "0"], "max_pending", None),
    "max_adapter_series": (["--max-adapter-series", "7"], "max_adapter_series", 7),
    "enable_log_requests": (["--enable-log-requests"], "log_requests", True),
    "disable_log_stats": (["--disable-log-stats"], "log_stats_interval", None),
    "shutdown_timeout": (["--shutdown-timeout", "2.5"], "shutdown_timeout", 2.5),
    "api_key": (["--api-key", "a", "b", "--api-key", "c"], "api_keys", ["a", "b", "c"]),
    "admin_api_key": (["--admin-api-key", "7"], "admin_api_key", "7"),
    "trust_request_chat_template": (["--trust-request-chat-template"], "trust_request_chat_template", True),
    "served_model_name": (["--served-model-name", "a", "1"], "served_model_names", ["a", "1"]),
    "generation_config": (["--generation-config", "vllm"], "use_generation_config", False),
    "lora_resolve_root": (["--lora-resolve-root", "/x"], "lora_resolve_root", "/x"),
    "lora_sources": (["--lora-sources", "s3://b/c", "hf://o"], "lora_sources", ["s3://b/c", "hf://o"]),
    "allow_runtime_lora_updating": (["--allow-runtime-lora-updating"], "allow_runtime_lora_updating", True),
    "lora_root": (["--lora-root", "/x"], "lora_root", "/x"),
    "tool_call_parser": (["--tool-call-parser", "llama3_json"], "tool_call_parser", "llama3_json"),
    "exclude_tools_when_tool_choice_none": (
        ["--exclude-tools-when-tool-choice-none"], "exclude_tools_when_tool_choice_none", True,
    ),
    "reasoning_parser": (["--reasoning-parser", "qwen3"], "reasoning_parser", "qwen3"),
}  # fmt: skip
# For those that the engine honours.
ENGINE: dict[str, tuple[list[str], Any]] = {
    "tokenizer": (["--tokenizer", "x"], "x"),
    "tokenizer_revision": (["--tokenizer-revision", "12"], "12"),
    "skip_tokenizer_init": (["--skip-tokenizer-init"], True),
    "revision": (["--revision", "1e5"], "1e5"),
    "hf_token": (["--hf-token"], True),
    "download_dir": (["--download-dir", "x"], "x"),
    "chat_template": (["--chat-template", "x"], "x"),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "dtype": (["--dtype", "half"], "half"),
    "seed": (["--seed", "7"], 7),
    "max_model_len": (["--max-model-len", "1.5k"], 1500),
    "max_logprobs": (["--max-logprobs", "-1"], -1),
    "logprobs_mode": (["--logprobs-mode", "raw_logits"], "raw_logits"),
    "max_num_seqs": (["--max-num-seqs", "5"], 5),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "8K"], 8192),
    "block_size": (["--block-size", "8"], 8),
    "kv_cache_memory_bytes": (["--kv-cache-memory-bytes", "2G"], 2 << 30),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "enforce_eager": (["--enforce-eager"], True),
    "batch_invariant": (["--batch-invariant"], True),
    "fixed_gemm_algorithm": (["--fixed-gemm-algorithm"], True),
    "enable_prefix_caching": (["--no-enable-prefix-caching"], False),
    "enable_chunked_prefill": (["--no-enable-chunked-prefill"], False),
    "scheduling_policy": (["--scheduling-policy", "priority"], "priority"),
    "num_threads": (["--threads", "1"], 1),
    "pin_threads": (["--pin-threads"], True),
    "max_lora_rank": (["--max-lora-rank", "9"], 9),
    "max_cpu_loras": (["--max-cpu-loras", "4"], 4),
    "lora_target_modules": (["--lora-target-modules", "q_proj", "v_proj"], ["q_proj", "v_proj"]),
    "lora_memory_bytes": (["--lora-memory-bytes", "1M"], 1 << 20),
    "lora_cache_bytes": (["--lora-cache-bytes", "1G"], 1 << 30),
    "lora_eviction": (["--lora-eviction", "cost_aware"], "cost_aware"),
    "loader_threads": (["--loader-threads", "3"], 3),
    "max_deferred_steps": (["--max-deferred-steps", "9"], 9),
    "strict_base": (["--strict-base"], True),
    "record_trace": (["--record-trace", "x.jsonl"], "x.jsonl"),
}
# Those with a test of their own, here or with what they do.
APART = {"config", "enable_lora", "keys_file", "lora_modules", "lora_manifest", "max_loras", "log_level", "log_format"}


def test_every_honoured_flag_is_in_one_of_the_lists() -> None:
    assert {flag.name for flag in of(Treatment.HONOURED)} == set(SERVER) | set(ENGINE) | APART


@pytest.mark.parametrize("name", SERVER)
def test_an_honoured_flag_reaches_the_server(name: str) -> None:
    given, key, expected = SERVER[name]
    assert planned(*given).server[key] == expected
    assert planned().server[key] != expected
    with_underscores = [item.replace("-", "_").replace("__", "--", 1) if item[:2] == "--" else item for item in given]
    assert planned(*with_underscores).server[key] == expected


@pytest.mark.parametrize("name", ENGINE)
def test_an_honoured_flag_reaches_the_engine(name: str) -> None:
    given, expected = ENGINE[name]
    engine = planned(*given).engine
    assert getattr(Settings(model=BASE, **engine), name) == expected
    assert name not in planned().engine


def test_lora_is_enabled_by_whatever_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = tmp_path / "adapters.yaml"
    manifest.write_text(json.dumps([{"name": "m", "path": str(ADAPTERS / "beta")}]))
    assert planned().engine["enable_lora"] is False
    for given in (
        ["--enable-lora"],
        ["--lora-modules", "a=x"],
        ["--lora-manifest", str(manifest)],
        ["--lora-resolve-root", "/x"],
        ["--allow-runtime-lora-updating"],
    ):
        assert planned(*given).engine["enable_lora"] is True, given
    both = planned("--lora-modules", "a=x", "b=y", "--lora-modules", "c=z", "--lora-manifest", str(manifest))
    assert both.modules == [("a", "x"), ("b", "y"), ("c", "z"), ("m", str(ADAPTERS / "beta"))]
    assert planned("--max-loras", "3").engine["max_loras"] == 3
    for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "MANYLORA_ALLOW_RUNTIME_LORA_UPDATING"):
        with monkeypatch.context() as context:
            context.setenv(name, "True")
            assert planned().server["allow_runtime_lora_updating"] is True


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--max-lora", "3"], "no flag --max-lora; did you mean --max-loras?"),
        (["--max_lora_ranks=3"], "no flag --max-lora-ranks; did you mean --max-lora-rank?"),
        (["--zzz"], "there is no flag --zzz\n"),
        (["--port", "65536"], "port must be an integer from 0 to 65535, got 65536"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1, got 0"),
        (["--max-num-seqs", "1.5K"], "max_num_seqs must be"),
        (["--lora-eviction", "fifo"], "lora_eviction must be lru or cost_aware, got 'fifo'"),
        (["--shutdown-timeout=-1"], "shutdown_timeout must be a number from 0 up"),
        (["second"], "unrecognized arguments: second"),
    ],
)
def test_what_cannot_be_parsed_is_named(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(BASE, *given)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_short_forms_and_a_base_after_flags() -> None:
    assert parse(BASE, "-tp", "2", "-ep", "-O", "1").tensor_parallel_size == 2
    assert planned("-tp", "1").engine["tensor_parallel_size"] == 1
    assert parse("--port", "0", BASE).model_tag == BASE
    assert plan(parse("--port", "0", "--model", BASE)).model == BASE


def write(folder: Path, text: str) -> str:
    file = folder / "serve.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        f"""
model: {BASE}
port: 0
max_lora_rank: 32
max-num-batched-tokens: 8K
revision: 12
enable-prefix-caching: false
no-enable-chunked-prefill: true
admin_api_key:
api-key: [file]
allowed-origins: [https://a, https://b]
lora-modules:
  - alpha={ADAPTERS / "alpha"}
  - {{name: "b=eta", path: {ADAPTERS / "beta"}}}
served-model-name: base
disable-log-requests: false
""",
    )
    asked = plan(parse("--config", file, "--max-lora-rank", "64", "--api_key", "given"))
    assert asked.model == BASE
    assert asked.modules == [("alpha", str(ADAPTERS / "alpha")), ("b=eta", str(ADAPTERS / "beta"))]
    engine = {name: asked.engine[name] for name in ("max_lora_rank", "max_num_batched_tokens", "revision")}
    assert engine == {"max_lora_rank": 64, "max_num_batched_tokens": 8192, "revision": "12"}
    assert (asked.engine["enable_prefix_caching"], asked.engine["enable_chunked_prefill"]) == (False, False)
    assert asked.server["allowed_origins"] == ["https://a", "https://b"]
    assert (asked.server["port"], asked.server["api_keys"], asked.server["admin_api_key"]) == (0, ["given"], None)
    assert plan(parse("other", "--config", file)).model == "other"


def test_keys_of_the_environment_count_where_no_flag_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_API_KEY", "user")
    monkeypatch.setenv("MANYLORA_ADMIN_API_KEY", "admin")
    server = planned().server
    assert (server["api_keys"], server["admin_api_key"]) == (["user"], "admin")
    server = planned("--api-key", "a", "--admin-api-key", "b").server
    assert (server["api_keys"], server["admin_api_key"]) == (["a"], "b")
    monkeypatch.setenv("MANYLORA_ADMIN_API_KEY", "")
    assert planned().server["admin_api_key"] is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-lora: 3", "has the key `max-lora`, which is no flag that it can set; did you mean --max-loras?"),
        ("config: x.yaml", "has the key `config`"),
        ("max-loras: many", "has the key `max-loras`, which max_loras must be an integer of at least 1, got 'many'"),
        ("enable-lora: 1", "has the key `enable-lora`, which must be true or false, got 1"),
        ("- port", "must hold flags as keys"),
        ("port: [", "cannot be read"),
    ],
)
def test_a_bad_file_says_what_is_wrong(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", BASE, "--config", write(tmp_path, text)])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", BASE, "--config", "/nowhere/serve.yaml"])
    assert "`/nowhere/serve.yaml` cannot be read" in capsys.readouterr().err


def test_a_server_starts_from_a_file(start_server: StartServer, tmp_path: Path) -> None:
    file = write(tmp_path, f"lora-modules: [alpha={ADAPTERS / 'alpha'}]\nserved_model_name: of-the-file\n")
    server = start_server("--config", file)
    assert server.ids() == ["base", "alpha"]
    assert server.complete("alpha").status_code == 200


def test_the_documented_table_is_the_one_that_is_applied() -> None:
    page = ORACLE.parent.parent / "docs" / "serve-arguments.md"
    assert page.read_text() == serve_arguments.markdown(), "write it again; its head says how"
