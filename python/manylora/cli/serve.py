"""`manylora serve`: the OpenAI-compatible server; names and defaults of `vllm serve`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manylora import _core
from manylora.adapter_cache import prune
from manylora.arguments import BY_NAME as ARGUMENTS
from manylora.arguments import Treatment
from manylora.cli.keys import has_terminal, read_keys, reloader
from manylora.cli.log import set_log
from manylora.cli.modules import modules, register
from manylora.exceptions import AdapterNotFoundError, ManyLoRAError, ValidationError
from manylora.flags import add_flag
from manylora.llm import LLM
from manylora.serve_arguments import BY_NAME, FLAGS, SECTIONS
from manylora.sources import fetch_adapter

logger = logging.getLogger("manylora")

EXAMPLES = """\
examples:
  manylora serve ./Qwen2.5-0.5B-Instruct --lora-modules sql=./sql support=./support --max-lora-rank 64
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "sql", "prompt": "List all customers.", "max_tokens": 32}'

every flag, and what those of vLLM do that are not shown: docs/serve-arguments.md

environment:
  MANYLORA_ADMIN_API_KEY                 the admin key, where --admin-api-key gives none
  MANYLORA_ALLOW_RUNTIME_LORA_UPDATING   1 lets adapters be loaded and unloaded over HTTP (also under VLLM_'s name)
  MANYLORA_API_KEY                       the API key, where --api-key gives none (also under VLLM_'s name)
  MANYLORA_LOG_STATS_INTERVAL            seconds between lines about the engine (also under VLLM_'s name)
  MANYLORA_LORA_RESOLVER_CACHE_DIR       the same as --lora-resolve-root (also under VLLM_'s name)
"""


@dataclass
class Plan:
    """What a command line asks for.

    Attributes:
        model: the base.
        modules: adapters that are there from the start, (name, path or hub id).
        engine: arguments of `LLM(...)`.
        server: settings of the server.
        keys_file: where users' keys are read from, if they are.

    """

    model: str
    modules: list[tuple[str, str]]
    engine: dict[str, Any]
    server: dict[str, Any]
    keys_file: str | None = None


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "serve",
        help="serve a base and its adapters over HTTP",
        description="Serve a base model and its adapters over HTTP, as OpenAI's API with an adapter's name in `model`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the base and every flag of the table."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="local folder, GGUF file or hub id of the base")
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help="the same")
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title[:1].lower() + title[1:])
        for argument in section:
            add_flag(group, BY_NAME[argument.name])
    parser.set_defaults(run=run, parser=parser)


def _from_environment(name: str) -> str | None:
    return os.environ.get(f"MANYLORA_{name}") or os.environ.get(f"VLLM_{name}")


def _checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the server's own flags, defaults filled in.

    Raises:
        ValidationError: one that is refused was given; the engine's are the engine's to refuse.

    """
    values: dict[str, Any] = {}
    unused = []
    for flag in FLAGS:
        argument, value = flag.argument, getattr(arguments, flag.name)
        if flag.is_engine:
            continue
        is_default = argument.is_default(value)
        if argument.treatment is Treatment.HONOURED:
            values[flag.name] = argument.default if value is None else value
        elif not is_default and argument.treatment is Treatment.REFUSED:
            raise ValidationError(
                f"{flag.spelling} {value!r} is not supported: {argument.note}; leave it at {argument.default!r}"
            )
        elif not is_default:
            unused.append((flag.spelling, argument.note))
    for shown, note in unused:
        logger.warning("%s has no effect: %s", shown, note)
    return values


def plan(arguments: argparse.Namespace) -> Plan:
    """Return what a command line asks for.

    Raises:
        ValidationError: it asks for something that is not supported.

    """
    model = arguments.model_tag or arguments.model_option
    if model is None:
        arguments.parser.error("give the base: manylora serve MODEL")
    given = _checked(arguments)
    adapters = modules(arguments)
    allow = given["allow_runtime_lora_updating"] or (
        (_from_environment("ALLOW_RUNTIME_LORA_UPDATING") or "").lower() in ("1", "true")
    )
    resolve_root = given["lora_resolve_root"] or _from_environment("LORA_RESOLVER_CACHE_DIR")
    environment_key = _from_environment("API_KEY")
    engine = {
        "served_model_name": given["served_model_name"],
        "enable_lora": bool(given["enable_lora"] or adapters or allow or given["lora_manifest"] or resolve_root),
        "max_loras": given["max_loras"],
    }
    for flag in FLAGS:
        value = getattr(arguments, flag.name)
        if flag.is_engine and value is not None:
            engine[flag.name] = value
    server = {
        "served_model_names": given["served_model_name"] or [model],
        "model_root": model,
        "keys": read_keys(given["keys_file"]) if given["keys_file"] else None,
        "api_keys": given["api_key"] or ([environment_key] if environment_key else []),
        "allow_runtime_lora_updating": allow,
        "lora_resolve_root": resolve_root,
        "lora_sources": given["lora_sources"] or [],
        "use_generation_config": given["generation_config"] == "auto",
        "max_pending": given["max_pending"] or None,
        "log_requests": given["enable_log_requests"],
        "log_stats_interval": None if given["disable_log_stats"] else _log_stats_interval(),
        "reasoning_parser": given["reasoning_parser"] or None,
        "root_path": given["root_path"] or "",
        "describe_routes": not given["disable_fastapi_docs"],
        "page": not given["disable_page"],
        "allowed_origins": _listed("allowed_origins", given["allowed_origins"]) or [],
        "allowed_methods": _listed("allowed_methods", given["allowed_methods"]),
        "allowed_headers": _listed("allowed_headers", given["allowed_headers"]),
    }
    server |= {name: given[name] for name in _AS_GIVEN}
    server["admin_api_key"] = given["admin_api_key"] or os.environ.get("MANYLORA_ADMIN_API_KEY") or None
    return Plan(model, adapters, engine, server, given["keys_file"])


# Flags that the server takes under the same name and as they are.
_AS_GIVEN = (
    "host", "port", "lora_root", "trust_request_chat_template", "max_adapter_series", "max_body_bytes",
    "shutdown_timeout", "tool_call_parser", "exclude_tools_when_tool_choice_none",
    "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh", "allow_credentials",
)  # fmt: skip


def _log_stats_interval() -> float:
    text = _from_environment("LOG_STATS_INTERVAL") or "10"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValidationError(f"MANYLORA_LOG_STATS_INTERVAL must be seconds above 0, got `{text}`")
    return seconds


def _listed(name: str, values: list[str] | None) -> list[str] | None:
    """Return values that may be given as a JSON list, as vLLM takes them, or as several."""
    if values is None:
        return None
    listed: list[str] = []
    for value in values:
        try:
            items = json.loads(value) if value.startswith("[") else [value]
        except ValueError as error:
            raise ValidationError(f"{name} `{value}` is not a JSON list: {error}") from None
        if not all(isinstance(item, str) for item in items):
            raise ValidationError(f"{name} `{value}` must be a JSON list of strings")
        listed += items
    return listed


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is told to stop."""
    as_json = arguments.log_format == "json"
    set_log(arguments.log_level or "info", json_lines=as_json)
    hung_up: list[int] = []
    # Without a keys file, a hangup ends who was started in a terminal, with it; a service has none and stays.
    reloads = bool(arguments.keys_file) or not has_terminal()
    if reloads:
        # What would end the process until the server listens for it. The keys are read before that.
        signal.signal(signal.SIGHUP, lambda number, _: hung_up.append(number))
    asked = plan(arguments)
    # Before the model is loaded, which takes longer than finding out that the port is taken or a certificate is wrong.
    port = _core.Port(asked.server, _fetcher(asked.engine))
    with LLM(model=asked.model, use_tqdm_on_load=not as_json, **asked.engine) as llm:
        adapters = [(name, None, path) for name, path in asked.modules]
        register(llm.llm_engine, adapters, asked.server["served_model_names"])
        # The server handles them from here on; Python's own handler would raise beside it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        reload = reloader(asked.keys_file) if reloads else None

        def ready(scheme: str, host: str, port: int, notes: list[str]) -> None:
            _ready(scheme, host, port, notes)
            if hung_up:
                os.kill(os.getpid(), signal.SIGHUP)

        _core.serve(llm._core, port, ready, reload)
    return 0


def _fetcher(engine: dict[str, Any]) -> Callable[[str, str], tuple[str, str]]:
    """Return what the server calls to bring an adapter from elsewhere to this machine."""
    limit = engine.get("lora_cache_bytes", ARGUMENTS["lora_cache_bytes"].default)

    def fetch(name: str, url: str) -> tuple[str, str]:
        logger.info("fetching adapter `%s` from %s", name, url)
        try:
            folder = fetch_adapter(url, name, token=engine.get("hf_token"), redirects=False)
            prune(limit)
            return "found", str(folder)
        except AdapterNotFoundError as error:
            return "missing", str(error)
        except ManyLoRAError as error:
            return "failed", str(error)

    return fetch


def _ready(scheme: str, host: str, port: int, notes: list[str]) -> None:
    shown = f"[{host}]" if ":" in host else host
    for note in notes:
        logger.info("%s", note)
    logger.info("listening on %s://%s:%d", scheme, shown, port)
