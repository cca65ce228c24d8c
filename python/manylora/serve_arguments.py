"""The table of every flag of `vllm serve`, and what `manylora serve` does with each.

The engine's arguments are flags too, with what `manylora.arguments` says of them; the tables here are the server's own.
`manylora.cli.serve` is built from both, a test walks them, `docs/serve-arguments.md` is made from them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from manylora import arguments
from manylora.arguments import Argument, Kind, Treatment, _honoured, _no_effect, _refused


class Form(enum.Enum):
    """How a flag takes its value."""

    VALUE = "--flag VALUE"
    OPTIONAL = "--flag, or --flag VALUE"
    SWITCH = "--flag or --no-flag"
    LIST = "--flag VALUE VALUE ..."


@dataclass(frozen=True)
class Flag:
    """A flag of `manylora serve`.

    Attributes:
        argument: what it is called, takes and means.
        form: how it takes its value.
        is_engine: whether its value goes to `LLM(...)` as it is.

    """

    argument: Argument
    form: Form
    is_engine: bool

    @property
    def name(self) -> str:
        """Its name in Python and in a configuration file."""
        return self.argument.name

    @property
    def spelling(self) -> str:
        """Its long form on the command line."""
        return spelling(self.argument.name)


def spelling(name: str) -> str:
    """Return an argument's name as a flag."""
    return "--" + name.replace("_", "-")


_LOCAL_PROCESS = "one process serves; nothing is started beside it"
_NEVER_LOGGED = "prompts and outputs are never logged"
_LOGS = "logs go to standard error; --log-level sets how much"
_NO_PAGES = "there are no documentation pages, only /openapi.json"
_SOLE_PARSERS = "parsers are those that --tool-call-parser and --reasoning-parser name"
_NO_PLUGINS = "no code is loaded from flags"
_SOLE_HTTP = "HTTP/1.1 over TCP is the one way in"
_TEMPLATES = "templates get content in the form that they take"
_ASKED_FOR = "each request asks for it itself"

LISTENING = (
    _honoured("config", None, Kind.PATH, "YAML file with flags as keys; what is on the command line wins"),
    _honoured("host", "127.0.0.1", Kind.TEXT, "address to listen on; 0.0.0.0 is all of this machine's"),
    _honoured("port", 8000, Kind.PORT, "port to listen on; 0 = any free one"),
    _refused("uds", None, _SOLE_HTTP, ""),
    _refused("grpc", False, _SOLE_HTTP),
    _honoured(
        "root_path",
        None,
        Kind.TEXT,
        "path that a proxy serves this server under; routes are found with and without it",
        same=("",),
    ),
    _honoured("ssl_certfile", None, Kind.PATH, "PEM file of the certificate, and of those up to its authority"),
    _honoured(
        "ssl_keyfile", None, Kind.PATH, "PEM file of its key, without a passphrase; None = it is in ssl_certfile"
    ),
    _honoured("ssl_ca_certs", None, Kind.PATH, "PEM file of the authorities that clients' certificates come from"),
    _honoured(
        "ssl_cert_reqs",
        0,
        Kind.WHOLE,
        "clients' certificates: 0 = they are asked for none, 1 = those without one come in too, 2 = they need one",
    ),
    _refused("ssl_ciphers", None, "TLS 1.2 and 1.3 are spoken with ciphers of which none is weak"),
    _honoured("enable_ssl_refresh", False, Kind.SWITCH, "read the files again when they change"),
    _honoured(
        "allowed_origins",
        None,
        Kind.NAMES,
        "origins whose pages may use the API from a browser, or *; as values or a JSON list. vLLM's default is *, "
        "here it is none; adapters are never managed from other origins' pages",
    ),
    _honoured("allowed_methods", None, Kind.NAMES, "methods that those pages may use; None or * = all"),
    _honoured("allowed_headers", None, Kind.NAMES, "headers that those pages may send; None or * = all"),
    _honoured(
        "allow_credentials",
        False,
        Kind.SWITCH,
        "let browsers send cookies and certificates along; not with the origin *",
    ),
    _refused("middleware", None, _NO_PLUGINS, []),
    _refused("headless", False, _LOCAL_PROCESS),
    _refused("api_server_count", None, _LOCAL_PROCESS, 1),
    _no_effect("disable_frontend_multiprocessing", False, _LOCAL_PROCESS),
    _no_effect("h11_max_incomplete_event_size", None, "heads of requests have a limit of their own"),
    _no_effect("h11_max_header_count", None, "heads of requests have a limit of their own"),
    _honoured(
        "max_body_bytes",
        32 << 20,
        Kind.COUNT,
        "largest body of a request (the default is 32 MiB); large ones come to twice that together, and to 2,097,152 "
        "values",
        ours=True,
    ),
    _honoured(
        "max_pending",
        4096,
        Kind.WHOLE,
        "sequences that may wait and run before requests are answered 503; 0 = no limit",
        ours=True,
    ),
    _honoured(
        "max_adapter_series",
        512,
        Kind.WHOLE,
        "adapters with series of their own among the metrics; the rest share one, `other`",
        ours=True,
    ),
    _honoured(
        "shutdown_timeout",
        30.0,
        Kind.SECONDS,
        "seconds that running requests may go on after SIGINT or SIGTERM",
    ),
)

ACCESS = (
    _honoured("api_key", None, Kind.NAMES, "keys of users; None = the environment's, or none are needed"),
    _honoured(
        "keys_file",
        None,
        Kind.PATH,
        "YAML or JSON list of users' keys: name, key, and perhaps adapters, base, requests_per_minute, "
        "max_concurrent and weight; read again on SIGHUP, which gives nobody back what was used up of a limit; "
        "with one, /metrics needs a key that sees all",
        ours=True,
    ),
    _honoured(
        "admin_api_key",
        None,
        Kind.TEXT,
        "key for loading, unloading and pinning adapters; None = MANYLORA_ADMIN_API_KEY of the environment",
        ours=True,
    ),
    _honoured("trust_request_chat_template", False, Kind.SWITCH, "let requests bring a chat template of their own"),
)

ANSWERS = (
    _honoured("served_model_name", None, Kind.NAMES, "names of the base, the first of which answers have"),
    _honoured(
        "generation_config",
        "auto",
        Kind.TEXT,
        "sampling defaults; auto: the model's generation_config.json, vllm: none of them",
        "auto",
        "vllm",
    ),
    _refused("default_chat_template_kwargs", None, _ASKED_FOR, {}),
    _refused("chat_template_content_format", "auto", _TEMPLATES),
    _refused("response_role", "assistant", "answers are the assistant's"),
    _refused("return_tokens_as_token_ids", False, _ASKED_FOR),
    _refused("enable_force_include_usage", False, _ASKED_FOR),
    _honoured("disable_fastapi_docs", False, Kind.SWITCH, "no /openapi.json; there are no other documentation pages"),
    _honoured(
        "disable_page",
        False,
        Kind.SWITCH,
        "no page at /, which shows what is in memory and who runs (docs/page.md)",
        ours=True,
    ),
    _refused("enable_tokenizer_info_endpoint", False, "there is no such route"),
    _no_effect("enable_auto_tool_choice", False, "requests with tools may always leave it to the model"),
    _honoured(
        "tool_call_parser",
        None,
        Kind.TEXT,
        "how the model writes calls of tools; None = as its chat template says",
        "hermes",
        "qwen25",
        "llama3_json",
    ),
    _refused("tool_parser_plugin", None, _SOLE_PARSERS, ""),
    _refused("tool_server", None, "tools are the client's"),
    _honoured(
        "exclude_tools_when_tool_choice_none",
        False,
        Kind.SWITCH,
        "leave tools out of the prompts of requests that rule calls out",
    ),
    _honoured(
        "reasoning_parser",
        None,
        Kind.TEXT,
        "how the model marks its reasoning, which answers then have in reasoning_content; None = not at all",
        "qwen3",
        "deepseek_r1",
        same=("",),
    ),
    _no_effect("enable_prompt_tokens_details", False, "usage always says how many prompt tokens were cached"),
    _no_effect("enable_request_id_headers", False, "every answer has its request's id"),
    _no_effect("enable_server_load_tracking", False, "/load always counts"),
    _refused("use_gpu_for_pooling_score", False, "this engine generates; it has no pooling models"),
)

ADAPTERS = (
    _honoured("enable_lora", False, Kind.SWITCH, "serve adapters; implied by each of the next five"),
    _honoured("lora_modules", None, Kind.NAMES, 'adapters: NAME=PATH-or-hub-id, or JSON {"name": ..., "path": ...}'),
    _honoured(
        "lora_manifest",
        None,
        Kind.PATH,
        "more adapters: a YAML or JSON list of {name, path}; none is read before a request names it",
        ours=True,
    ),
    _honoured(
        "lora_resolve_root",
        None,
        Kind.PATH,
        "serve any good adapter folder below this one by its relative path, found when a request first names it",
        ours=True,
    ),
    _honoured(
        "allow_runtime_lora_updating",
        False,
        Kind.SWITCH,
        "let adapters be loaded, unloaded and pinned over HTTP",
        ours=True,
    ),
    _honoured(
        "lora_root",
        None,
        Kind.PATH,
        "where adapters loaded over HTTP must lie; None = the folder that the server is started in",
        ours=True,
    ),
    _honoured(
        "lora_sources",
        None,
        Kind.NAMES,
        "places elsewhere that adapters loaded over HTTP may be fetched from, with all below them: s3://bucket/folder, "
        "gs://, https://host/folder, hf://owner; None = nowhere",
        ours=True,
    ),
    _honoured("max_loras", None, Kind.COUNT, "distinct adapters per step; None = no cap"),
)

LOGS = (
    _honoured(
        "log_level",
        "info",
        Kind.TEXT,
        "what is logged, unless MANYLORA_LOG says it more exactly",
        "debug",
        "info",
        "warning",
        "error",
        ours=True,
    ),
    _honoured("log_format", "text", Kind.TEXT, "lines of text, or of JSON", "text", "json", ours=True),
    _honoured(
        "enable_log_requests",
        False,
        Kind.SWITCH,
        "log each request that has ended: id, adapter and version, tokens, times; never prompts or answers",
    ),
    _honoured(
        "disable_log_stats",
        False,
        Kind.SWITCH,
        "do not log every 10 seconds (MANYLORA_LOG_STATS_INTERVAL) what the engine does, while it does something",
    ),
    _no_effect("uvicorn_log_level", "info", _LOGS),
    _no_effect("log_config_file", None, _LOGS),
    _no_effect("disable_uvicorn_access_log", False, "requests are not logged one by one"),
    _no_effect("disable_access_log_for_endpoints", None, "requests are not logged one by one"),
    _no_effect("disable_log_requests", True, "they are not, unless --enable-log-requests is given"),
    _no_effect("enable_log_outputs", False, _NEVER_LOGGED),
    _no_effect("enable_log_deltas", True, _NEVER_LOGGED),
    _no_effect("max_log_len", None, _NEVER_LOGGED),
    _no_effect("log_error_stack", False, "errors name their place in the request"),
    _no_effect("enable_offline_docs", False, _NO_PAGES),
)

SERVER: dict[str, tuple[Argument, ...]] = {
    "Listening": LISTENING,
    "Access": ACCESS,
    "Requests and answers": ANSWERS,
    "Adapters": ADAPTERS,
    "Logs": LOGS,
}

# What vLLM's command line has beside the long form.
SHORT: dict[str, tuple[str, ...]] = {
    "api_server_count": ("-asc",),
    "attention_config": ("-ac",),
    "compilation_config": ("-cc",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_backend": ("-dpb",),
    "data_parallel_external_lb": ("-dpe",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_size": ("-dp",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_start_rank": ("-dpr",),
    "decode_context_parallel_size": ("-dcp",),
    "enable_expert_parallel": ("-ep",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "num_threads": ("--threads",),
    "optimization_level": ("-O",),
    "pipeline_parallel_size": ("-pp",),
    "prefill_context_parallel_size": ("-pcp",),
    "quantization": ("-q",),
    "speculative_config": ("-sc",),
    "tensor_parallel_size": ("-tp",),
}

# Those that may be given again for more; of others the last one counts.
REPEATED = frozenset(("api_key", "lora_modules"))

# Those that take several values although nothing in the table says so.
_LISTS = frozenset(
    (
        "allowed_headers", "allowed_media_domains", "allowed_methods", "allowed_origins", "collect_detailed_traces",
        "cuda_graph_sizes", "cudagraph_capture_sizes", "disable_access_log_for_endpoints", "ignore_patterns",
        "kv_cache_dtype_skip_layers", "logits_processors", "middleware", "numa_bind_cpus", "numa_bind_nodes",
        "offload_params",
    )
)  # fmt: skip


def _form(argument: Argument) -> Form:
    values = (argument.default, *argument.same)
    if argument.treatment is not Treatment.HONOURED:
        is_switch = any(isinstance(value, bool) for value in values)
        return Form.SWITCH if is_switch else Form.LIST if argument.name in _LISTS else Form.VALUE
    match argument.kind:
        case Kind.SWITCH:
            return Form.SWITCH
        case Kind.NAMES | Kind.PATHS:
            return Form.LIST
        case Kind.TOKEN:
            return Form.OPTIONAL
        case _:
            return Form.VALUE


_OF_SERVER = tuple(argument for section in SERVER.values() for argument in section)
_TAKEN = frozenset(argument.name for argument in _OF_SERVER)
# The model is named without a flag; the bar is for terminals of programs.
_ELSEWHERE = _TAKEN | {"model", "use_tqdm_on_load"}
SECTIONS: dict[str, tuple[Argument, ...]] = SERVER | {
    f"Engine: {title[:1].lower()}{title[1:]}" if title != "LoRA" else "Engine: LoRA": tuple(
        argument for argument in section if argument.name not in _ELSEWHERE
    )
    for title, section in arguments.SECTIONS.items()
}
FLAGS: tuple[Flag, ...] = tuple(
    Flag(argument, _form(argument), argument.name not in _TAKEN)
    for section in SECTIONS.values()
    for argument in section
)
BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}


def engine_flag(argument: Argument) -> Flag:
    """Return the flag of an argument of the engine, whatever the server makes of it."""
    return Flag(argument, _form(argument), is_engine=True)


def markdown() -> str:
    """Return the table as the page `docs/serve-arguments.md`."""
    head = [
        "# Flags of `manylora serve`",
        "",
        "Every flag of `vllm serve`, and what ManyLoRA does with it. *Honoured*: it works. *Accepted without effect*:",
        "giving it logs one warning with the reason. *Refused*: giving it with anything but its default ends the start",
        "with the reason. Flags marked + are ManyLoRA's own. Each may be written with `-` or `_`, and be a key of the",
        "YAML file that `--config` names. The base is named without a flag: `manylora serve MODEL`.",
        "",
        "This page is the table that the code applies, written by",
        "`python -c 'from manylora import serve_arguments; print(serve_arguments.markdown(), end=\"\")' > "
        "docs/serve-arguments.md`.",
    ]
    return arguments.page(head, SECTIONS, spelling)
