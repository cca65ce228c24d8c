"""`manylora serve`: the OpenAI-compatible server; names and defaults of `vllm serve`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from typing import Any

from manylora import _core
from manylora.arguments import ARGUMENTS, Argument, Kind, Treatment
from manylora.engine import read_manifest
from manylora.exceptions import ManyLoRAError, ValidationError
from manylora.llm import LLM

logger = logging.getLogger("manylora")

EXAMPLES = """\
examples:
  manylora serve ./Qwen2.5-0.5B-Instruct --lora-modules sql=./sql support=./support --max-lora-rank 64
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "sql", "prompt": "List all customers.", "max_tokens": 32}'

environment:
  MANYLORA_ALLOW_RUNTIME_LORA_UPDATING   1 lets adapters be loaded and unloaded over HTTP (also under VLLM_'s name)
  MANYLORA_API_KEY                       the API key, where --api-key gives none (also under VLLM_'s name)
  MANYLORA_LORA_RESOLVER_CACHE_DIR       the same as --lora-resolve-root (also under VLLM_'s name)
"""

# Arguments of `LLM(...)` that mean something else to a server, or are its own.
_ELSEWHERE = (
    "model", "served_model_name", "generation_config", "enable_lora", "max_loras", "use_tqdm_on_load", "lora_root",
    "shutdown_timeout",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "serve",
        help="serve a base and its adapters over HTTP",
        description="Serve a base model and its adapters over HTTP, as OpenAI's API with an adapter's name in `model`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="local folder, GGUF file or hub id of the base")
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help="the same")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    server.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 = any free one (default: 8000)")
    server.add_argument("--api-key", action="append", default=[], metavar="KEY", help="key of users; may be repeated")
    server.add_argument("--admin-api-key", metavar="KEY", help="key for loading, unloading and pinning adapters")
    server.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="names of the base")
    server.add_argument(
        "--generation-config",
        default="auto",
        choices=("auto", "vllm"),
        help="sampling defaults: auto = the model's generation_config.json, vllm = none of them",
    )
    server.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring a chat template of their own"
    )
    server.add_argument(
        "--max-pending",
        type=_count,
        default=4096,
        metavar="N",
        help="sequences that may wait and run before requests are answered 503; 0 = no limit (default: 4096)",
    )
    server.add_argument(
        "--max-adapter-series",
        type=_count,
        default=512,
        metavar="N",
        help="adapters with series of their own among the metrics; the rest share one, `other` (default: 512)",
    )
    server.add_argument(
        "--max-body-bytes",
        type=_count,
        default=32 << 20,
        metavar="N",
        help="largest body of a request (default: 32 MiB)",
    )
    server.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGINT or SIGTERM (default: 30)",
    )
    lora = parser.add_argument_group("adapters")
    lora.add_argument("--enable-lora", action="store_true", help="serve adapters (implied by --lora-modules)")
    lora.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help='adapters to serve: NAME=PATH-or-hub-id, or JSON {"name": ..., "path": ...}',
    )
    lora.add_argument("--max-loras", type=_count, metavar="N", help="distinct adapters per step (default: no cap)")
    lora.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let adapters be loaded, unloaded and pinned over HTTP",
    )
    lora.add_argument(
        "--lora-root", metavar="FOLDER", help="where adapters loaded over HTTP must lie (default: the current folder)"
    )
    lora.add_argument(
        "--lora-manifest",
        metavar="FILE",
        help="adapters to serve: a YAML or JSON list of {name, path}; none is read before a request names it",
    )
    lora.add_argument(
        "--lora-resolve-root",
        metavar="FOLDER",
        help="serve any good adapter folder below this one by its relative path, found when a request first names it",
    )
    engine = parser.add_argument_group("engine")
    for argument in ARGUMENTS:
        if argument.name not in _ELSEWHERE:
            _add_engine_argument(engine, argument)
    parser.set_defaults(run=run, parser=parser)


def _add_engine_argument(group: Any, argument: Argument) -> None:
    """Add an argument of the engine under its name; what has no effect or is refused says so when it is given."""
    flag = "--" + argument.name.replace("_", "-")
    shown = argument.note if argument.treatment is Treatment.HONOURED else argparse.SUPPRESS
    is_switch = argument.kind is Kind.SWITCH and argument.treatment is Treatment.HONOURED
    if is_switch or isinstance(argument.default, bool):
        group.add_argument(
            flag, dest=argument.name, action=argparse.BooleanOptionalAction, default=None, help=_escaped(shown)
        )
        return
    metavar = None if argument.choices else argument.name.upper()
    group.add_argument(flag, dest=argument.name, type=_value, default=None, metavar=metavar, help=_escaped(shown))


def _escaped(text: str) -> str:
    return text if text == argparse.SUPPRESS else text.replace("%", "%%")


def _value(text: str) -> Any:
    """Read a value as the engine's own checks want it: a number or JSON where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError("must be from 0 to 65535")
    return number


def lora_module(text: str) -> tuple[str, str] | None:
    """Read one item of `--lora-modules`; None for an empty one.

    Raises:
        ValueError: it is neither NAME=PATH nor an object with `name` and `path`.

    """
    if not text:
        return None
    if "=" in text and "," not in text and not text.lstrip().startswith("{"):
        name, path = text.split("=", 1)
        if name.strip() and path:
            return name, path
        raise ValueError(f"`{text}` must be NAME=PATH")
    try:
        entry = json.loads(text)
    except ValueError:
        raise ValueError(f"`{text}` is neither NAME=PATH nor JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("path"), str):
        raise ValueError(f"`{text}` must be an object with `name` and `path`")
    if entry.get("is_3d_lora_weight"):
        raise ValueError("`is_3d_lora_weight` is not supported: there are no mixture-of-experts models")
    return entry["name"], entry["path"]


def _from_environment(name: str) -> str | None:
    return os.environ.get(f"MANYLORA_{name}") or os.environ.get(f"VLLM_{name}")


def _modules(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    modules: dict[str, str] = {}
    for text in arguments.lora_modules:
        try:
            module = lora_module(text)
        except ValueError as error:
            arguments.parser.error(f"argument --lora-modules: {error}")
        if module is not None:
            if module[0] in modules:
                arguments.parser.error(f"argument --lora-modules: `{module[0]}` is given twice")
            modules[module[0]] = module[1]
    for name, _, path in read_manifest(arguments.lora_manifest) if arguments.lora_manifest else ():
        if name in modules:
            raise ValidationError(f"adapter `{name}` is given twice, by --lora-modules or in the manifest")
        modules[name] = path
    return list(modules.items())


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is told to stop."""
    model = arguments.model_tag or arguments.model_option
    if model is None:
        arguments.parser.error("give the base: manylora serve MODEL")
    modules = _modules(arguments)
    allow = arguments.allow_runtime_lora_updating or (
        _from_environment("ALLOW_RUNTIME_LORA_UPDATING") or ""
    ).lower() in (
        "1",
        "true",
    )
    engine = {
        argument.name: getattr(arguments, argument.name)
        for argument in ARGUMENTS
        if argument.name not in _ELSEWHERE and getattr(arguments, argument.name) is not None
    }
    resolve_root = arguments.lora_resolve_root or _from_environment("LORA_RESOLVER_CACHE_DIR")
    environment_key = _from_environment("API_KEY")
    settings = {
        "host": arguments.host,
        "port": arguments.port,
        "served_model_names": arguments.served_model_name or [model],
        "model_root": model,
        "api_keys": arguments.api_key or ([environment_key] if environment_key else []),
        "admin_api_key": arguments.admin_api_key,
        "allow_runtime_lora_updating": allow,
        "lora_root": arguments.lora_root,
        "lora_resolve_root": resolve_root,
        "use_generation_config": arguments.generation_config == "auto",
        "trust_request_chat_template": arguments.trust_request_chat_template,
        "max_body_bytes": arguments.max_body_bytes,
        "max_pending": arguments.max_pending or None,
        "max_adapter_series": arguments.max_adapter_series,
        "shutdown_timeout": arguments.shutdown_timeout,
    }
    # Before the model is loaded, which takes longer than finding out that the port is taken.
    port = _core.Port(arguments.host, arguments.port)
    with LLM(
        model=model,
        served_model_name=arguments.served_model_name or None,
        enable_lora=bool(arguments.enable_lora or modules or allow or arguments.lora_manifest or resolve_root),
        max_loras=arguments.max_loras,
        **engine,
    ) as llm:
        _register(llm, modules, settings["served_model_names"])
        # The server handles them from here on; Python's own handler would raise beside it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _core.serve(llm._core, port, settings, _ready)
    return 0


def _register(llm: LLM, modules: list[tuple[str, str]], base_names: list[str]) -> None:
    for name, _ in modules:
        if name in base_names:
            raise ValidationError(f"The lora adapter '{name}' conflicts with a served base model.")
    if not modules:
        return
    adapters = [(name, None, llm.llm_engine._path(path, name)) for name, path in modules]
    for result in llm._core.register_adapters(adapters):
        if isinstance(result, ManyLoRAError):
            raise result
    logger.info("%d adapters registered; each is read when a request first names it", len(modules))


def _ready(host: str, port: int, notes: list[str]) -> None:
    shown = f"[{host}]" if ":" in host else host
    for note in notes:
        logger.info("%s", note)
    logger.info("listening on http://%s:%d", shown, port)
