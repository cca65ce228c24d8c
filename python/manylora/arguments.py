"""The table of every argument of vLLM's `LLM(...)`, and what ManyLoRA does with each.

*Honoured*, *without effect* (accepted; one warning when it is set) or *refused* (accepted at its default; otherwise an
error with the reason). `manylora.engine_args` applies it, a test walks it, `docs/llm-arguments.md` is made from it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Treatment(enum.Enum):
    """What happens to an argument."""

    HONOURED = "honoured"
    WITHOUT_EFFECT = "accepted without effect"
    REFUSED = "refused"


class Kind(enum.Enum):
    """What values an honoured argument takes; the value is how an error names it."""

    TEXT = "text"
    PATH = "a path or hub id"
    PATHS = "a path or a list of paths"
    NAMES = "a string or a list of strings"
    SWITCH = "True or False"
    COUNT = "an integer of at least 1"
    WHOLE = "an integer from 0 up"
    PORT = "an integer from 0 to 65535"
    SECONDS = "a number from 0 up"
    LIMIT = "an integer from 0 up, or -1 for no limit"
    TOKEN = "a string, True or False"
    SHARE = "a number above 0 and at most 1"
    DTYPE = "auto, bfloat16, float32, float16, or a torch dtype of that name"
    DEVICE = "auto, cpu, cuda, cuda:N, or a torch device of that name"


@dataclass(frozen=True)
class Argument:
    """One argument of `LLM(...)`.

    Attributes:
        name: its name in vLLM, or ours.
        default: its default here.
        treatment: what happens to it.
        note: what it means here, or why it has no effect or is refused.
        kind: what values it takes; only of honoured ones.
        choices: the values it takes, when they are few.
        same: further values that mean the same as the default.
        ours: whether vLLM does not have it.

    """

    name: str
    default: Any
    treatment: Treatment
    note: str
    kind: Kind = Kind.TEXT
    choices: tuple[str, ...] = ()
    same: tuple[Any, ...] = ()
    ours: bool = False

    def is_default(self, value: Any) -> bool:
        """Whether a value means the same as the default."""
        return value is None or any(value is same or value == same for same in (self.default, *self.same))


def _honoured(
    name: str, default: Any, kind: Kind, note: str, *choices: str, same: tuple[Any, ...] = (), ours: bool = False
) -> Argument:
    return Argument(name, default, Treatment.HONOURED, note, kind, choices, same, ours)


def _no_effect(name: str, default: Any, note: str, *same: Any) -> Argument:
    return Argument(name, default, Treatment.WITHOUT_EFFECT, note, same=same)


def _refused(name: str, default: Any, note: str, *same: Any) -> Argument:
    return Argument(name, default, Treatment.REFUSED, note, same=same)


_OWN_KERNELS = "kernels are ManyLoRA's own"
_GRAPHS = "the engine decides which steps cards record"
_ONE_DEVICE = "one process and one device are used"
_EXPERTS = "mixture-of-experts models are not supported yet"
_MULTIMODAL = "models are text-only"
_MAMBA = "state-space models are not supported"
_POOLING = "this engine generates; it has no pooling models"
_SPECULATIVE = "speculative decoding is not supported yet"
_STRUCTURED = "each request says it, in structured_outputs"
_SOLE_GRAMMARS = "llguidance follows all grammars"
_METRICS = "`llm.llm_engine.stats()` has the counters"
_ROPE = "the checkpoint's own rotary embedding is used"
_CHUNKS = "chunks are sized by max_num_batched_tokens"
_LOCAL_CACHE = "KV blocks stay in this process"
_QUANTIZED = "quantized checkpoints are recognized and dequantized at load"
_IN_MEMORY = "weights stay where they are computed with"

MODEL = (
    _honoured("model", None, Kind.PATH, "local folder (Hugging Face layout), GGUF file, or hub id"),
    _honoured("tokenizer", None, Kind.PATH, "local folder, GGUF file or hub id; None = the model's own"),
    _honoured("tokenizer_revision", None, Kind.TEXT, "hub revision of `tokenizer`"),
    _honoured("skip_tokenizer_init", False, Kind.SWITCH, "prompts are token ids, outputs have no text"),
    _honoured("revision", None, Kind.TEXT, "hub revision of `model`"),
    _honoured("hf_token", None, Kind.TOKEN, "token for the hub"),
    _honoured("download_dir", None, Kind.PATH, "cache folder of the hub for model and tokenizer"),
    _honoured("served_model_name", None, Kind.NAMES, "further names that the base answers to"),
    _honoured("chat_template", None, Kind.TEXT, "template text, or a file with it, that replaces the model's"),
    _honoured(
        "device",
        "auto",
        Kind.DEVICE,
        "cpu, cuda (the first card) or cuda:N; auto: the first card where one can be used, else the CPU",
    ),
    _honoured("dtype", "auto", Kind.DTYPE, "auto, bfloat16, float32 (CPU only), float16 (a CPU computes in float32)"),
    _honoured("seed", 0, Kind.WHOLE, "seed of requests that bring none"),
    _honoured(
        "max_model_len",
        None,
        Kind.COUNT,
        "longest sequence; None = the model's context, lowered to what fits",
        same=(-1, "auto"),
    ),
    _honoured(
        "generation_config",
        "auto",
        Kind.TEXT,
        "auto: defaults of generation_config.json; vllm: none of them",
        "auto",
        "vllm",
    ),
    _honoured("max_logprobs", 20, Kind.LIMIT, "most logprobs per token; -1 = the whole vocabulary"),
    _honoured(
        "logprobs_mode",
        "raw_logprobs",
        Kind.TEXT,
        "what logprobs are of, before temperature and penalties",
        "raw_logprobs",
        "raw_logits",
    ),
    _honoured("use_tqdm_on_load", True, Kind.SWITCH, "show a progress bar while the model loads"),
    _honoured("disable_log_stats", True, Kind.SWITCH, "False logs the engine's counters when it is closed"),
    _no_effect("trust_remote_code", False, "no code of a checkpoint is ever run"),
    _no_effect("tokenizer_mode", "auto", "there is one tokenizer implementation, the fast one"),
    _no_effect("load_format", "auto", "the format is recognized"),
    _no_effect("config_format", "auto", "the format is recognized"),
    _no_effect("safetensors_load_strategy", None, "files are memory-mapped", "lazy"),
    _no_effect("ignore_patterns", None, "only files that are needed are fetched", "original/**/*", ["original/**/*"]),
    _no_effect("pt_load_map_location", "cpu", "pickled weights are never read"),
    _no_effect("code_revision", None, "no code of a checkpoint is ever run"),
    _no_effect("renderer_num_workers", 1, "prompts are prepared by the calling thread"),
    _no_effect("fail_on_environ_validation", False, "unknown environment variables are not looked at"),
    _refused("hf_config_path", None, "the checkpoint's own configuration is used"),
    _refused("hf_overrides", None, "the checkpoint's configuration is taken as it is", {}),
    _refused("model_loader_extra_config", None, "there are no other loaders", {}),
    _refused("rope_scaling", None, _ROPE, {}),
    _refused("rope_theta", None, _ROPE),
    _refused("model_impl", "auto", "there is one implementation", "vllm"),
    _refused("runner", "auto", _POOLING, "generate"),
    _refused("convert", "auto", _POOLING, "none"),
    _refused("task", "auto", _POOLING, "generate"),
    _refused("pooler_config", None, _POOLING),
    _refused("override_pooler_config", None, _POOLING),
    _refused("override_generation_config", None, "give SamplingParams instead", {}),
    _refused("enable_prompt_embeds", False, "prompts are text or token ids"),
    _refused("tokens_only", False, "set skip_tokenizer_init instead"),
    _refused("logits_processors", None, "custom logits processors are not supported", []),
    _refused("logits_processor_pattern", None, "custom logits processors are not supported"),
    _refused("io_processor_plugin", None, "there are no plug-ins"),
    _refused("quantization", None, _QUANTIZED, "auto"),
    _refused("quantization_config", None, _QUANTIZED),
    _refused("disable_sliding_window", False, "a model's window is part of it"),
    _refused("additional_config", None, "there is nothing it could configure", {}),
)

MEMORY = (
    _honoured("max_num_seqs", 64, Kind.COUNT, "sequences per step"),
    _honoured("max_num_batched_tokens", 2048, Kind.COUNT, "rows per step"),
    _honoured("block_size", 16, Kind.COUNT, "tokens per KV block"),
    _honoured(
        "kv_cache_memory_bytes",
        None,
        Kind.COUNT,
        "bytes shared by KV blocks and adapters; None = from free memory, on a card what gpu_memory_utilization leaves",
    ),
    _honoured(
        "gpu_memory_utilization",
        0.92,
        Kind.SHARE,
        "share of a card's memory that is taken in all: driver, weights, working memory, KV blocks, adapters",
    ),
    _honoured(
        "enforce_eager", False, Kind.SWITCH, "cards launch every kernel of a step: nothing is recorded and replayed"
    ),
    _honoured(
        "batch_invariant",
        False,
        Kind.SWITCH,
        "cards multiply by their own kernels, so that results never depend on what shares a batch; CPUs always do",
        ours=True,
    ),
    _honoured(
        "fixed_gemm_algorithm",
        False,
        Kind.SWITCH,
        "cuBLASLt keeps one algorithm for each shape of weight, whatever shares a batch: results are then the same as "
        "far as its sums are, which only batch_invariant promises; small steps take longer",
        ours=True,
    ),
    _honoured("enable_prefix_caching", True, Kind.SWITCH, "keep KV blocks for requests with the same prefix"),
    _honoured("enable_chunked_prefill", True, Kind.SWITCH, "prompts may be split over steps"),
    _honoured(
        "scheduling_policy",
        "fair",
        Kind.TEXT,
        "order of waiting requests; fair: each tenant, adapter and the base gets its share of the tokens",
        "fair",
        "fcfs",
        "priority",
    ),
    _honoured(
        "num_threads", None, Kind.COUNT, "compute threads; None = physical cores within affinity and quota", ours=True
    ),
    _honoured("pin_threads", False, Kind.SWITCH, "pin compute threads to cores", ours=True),
    _no_effect("compilation_config", None, "nothing is compiled at start", {}),
    _no_effect("cuda_graph_sizes", None, _GRAPHS),
    _no_effect("cudagraph_capture_sizes", None, _GRAPHS),
    _no_effect("max_cudagraph_capture_size", None, _GRAPHS),
    _no_effect("max_seq_len_to_capture", None, _GRAPHS, 8192),
    _no_effect("cudagraph_metrics", False, _GRAPHS),
    _no_effect("optimization_level", 2, "nothing is compiled at start"),
    _no_effect("performance_mode", "balanced", "there is one mode"),
    _no_effect("swap_space", 0, "preempted sequences are recomputed", 4),
    _no_effect("cpu_offload_gb", 0, _IN_MEMORY),
    _no_effect("cpu_offload_params", None, _IN_MEMORY, set()),
    _no_effect("offload_backend", "auto", _IN_MEMORY),
    _no_effect("offload_group_size", 0, _IN_MEMORY),
    _no_effect("offload_num_in_group", 1, _IN_MEMORY),
    _no_effect("offload_prefetch_step", 1, _IN_MEMORY),
    _no_effect("offload_params", None, _IN_MEMORY, set()),
    _no_effect("prefix_caching_hash_algo", "sha256", "one collision-resistant hash is used"),
    _no_effect("async_scheduling", None, "the engine decides", True, False),
    _no_effect("stream_interval", 1, "`LLM` returns final outputs"),
    _no_effect("long_prefill_token_threshold", 0, _CHUNKS),
    _no_effect("max_num_partial_prefills", 1, _CHUNKS),
    _no_effect("max_long_partial_prefills", 1, _CHUNKS),
    _no_effect("scheduler_reserve_full_isl", True, "blocks are taken as a sequence grows"),
    _no_effect("disable_hybrid_kv_cache_manager", None, "there is one kind of KV block", False),
    _no_effect("disable_cascade_attn", False, "there is one attention implementation"),
    _no_effect("attention_backend", None, "there is one attention implementation"),
    _no_effect("attention_config", None, "there is one attention implementation", {}),
    _no_effect("kernel_config", None, "kernels are chosen for the processor", {}),
    _no_effect("ir_op_priority", None, "kernels are chosen for the processor", {}),
    _no_effect("enable_flashinfer_autotune", None, _OWN_KERNELS, True, False),
    _no_effect("gdn_prefill_backend", None, _OWN_KERNELS),
    _no_effect("calculate_kv_scales", False, "the KV cache has the model's dtype"),
    _no_effect("kv_sharing_fast_prefill", False, "no supported model shares KV between layers"),
    _no_effect("max_parallel_loading_workers", None, "loading uses the compute threads"),
    _no_effect("disable_async_output_proc", False, "the engine decides"),
    _no_effect("num_lookahead_slots", 0, _SPECULATIVE),
    _no_effect("external_parameters", None, "there is one scheduler"),
    _no_effect("shutdown_timeout", 0, "closing the engine waits for the step in progress only"),
    _no_effect("numa_bind", False, "use pin_threads, and numactl for memory"),
    _no_effect("numa_bind_nodes", None, "use pin_threads, and numactl for memory"),
    _no_effect("numa_bind_cpus", None, "use pin_threads, and the process's affinity mask"),
    _refused("kv_cache_dtype", "auto", "the KV cache has the model's dtype"),
    _refused("kv_cache_dtype_skip_layers", None, "the KV cache has the model's dtype", []),
    _refused("override_attention_dtype", None, "attention is computed in float32", "auto"),
    _refused("num_gpu_blocks_override", None, "use kv_cache_memory_bytes"),
    _refused("scheduler_cls", None, "there is one scheduler"),
    _refused("enable_sleep_mode", False, "weights stay in memory"),
    _refused("kv_offloading_size", None, _LOCAL_CACHE),
    _refused("kv_offloading_backend", "native", _LOCAL_CACHE),
    _refused("kv_transfer_config", None, _LOCAL_CACHE),
    _refused("kv_events_config", None, _LOCAL_CACHE),
    _refused("ec_transfer_config", None, _MULTIMODAL),
    _refused("weight_transfer_config", None, "weights are read from files"),
    _refused("mamba_config", None, _MAMBA, {}),
    _refused("mamba_cache_dtype", "auto", _MAMBA),
    _refused("mamba_ssm_cache_dtype", "auto", _MAMBA),
    _refused("mamba_block_size", None, _MAMBA),
    _refused("mamba_cache_mode", "none", _MAMBA),
    _refused("mamba_backend", "triton", _MAMBA),
    _refused("enable_mamba_cache_stochastic_rounding", False, _MAMBA),
    _refused("mamba_cache_philox_rounds", 0, _MAMBA),
)

LORA = (
    _honoured("enable_lora", False, Kind.SWITCH, "whether adapters can be used"),
    _honoured(
        "max_lora_rank",
        16,
        Kind.COUNT,
        "largest rank accepted, up to 512 (none beyond that is); checked, never reserved",
    ),
    _honoured("max_loras", None, Kind.COUNT, "distinct adapters per step; None = no cap"),
    _honoured("max_cpu_loras", None, Kind.COUNT, "resident adapters; None = unbounded"),
    _honoured("lora_target_modules", None, Kind.NAMES, "modules that adapters may touch; None = all"),
    _honoured(
        "lora_memory_bytes",
        None,
        Kind.COUNT,
        "most bytes of adapters; None = elastic, shared with the KV cache",
        ours=True,
    ),
    _honoured(
        "lora_eviction",
        "lru",
        Kind.TEXT,
        "which resident adapter goes when room is needed; cost_aware weighs use, size and load time",
        "lru",
        "cost_aware",
        ours=True,
    ),
    _honoured(
        "loader_threads",
        None,
        Kind.COUNT,
        "threads that read adapters; None = 2, or one for every four that compute, up to 4",
        ours=True,
    ),
    _honoured(
        "max_deferred_steps",
        256,
        Kind.COUNT,
        "steps that max_loras may keep a waiting adapter out before others make room for it",
        ours=True,
    ),
    _honoured(
        "lora_root",
        None,
        Kind.PATHS,
        "folder(s) that adapters must lie in (what was fetched from the hub or a URL counts); None = any",
        ours=True,
    ),
    _honoured(
        "lora_cache_bytes",
        32 << 30,
        Kind.WHOLE,
        "bytes of fetched adapters (from URLs; hub ids have the hub's own cache) that are kept on this machine: beyond "
        "it (the default is 32 GiB) those go that no process uses, longest unused first; 0 = no limit",
        ours=True,
    ),
    _honoured("strict_base", False, Kind.SWITCH, "refuse adapters that name another base", ours=True),
    _no_effect("lora_dtype", "auto", "adapters are stored in the model's dtype"),
    _no_effect("specialize_active_lora", False, "kernels do not depend on the number of adapters"),
    _no_effect("lora_extra_vocab_size", 256, "adapters that add tokens are refused", 0),
    _no_effect("long_lora_scaling_factors", None, "the checkpoint's own rotary embedding is used"),
    _refused("fully_sharded_loras", False, _ONE_DEVICE),
    _refused("default_mm_loras", None, _MULTIMODAL),
    _refused("enable_tower_connector_lora", False, _MULTIMODAL),
    _refused("enable_mixed_moe_lora_format", False, _EXPERTS),
    _refused("enable_moe_shared_loras", False, _EXPERTS),
    _refused("max_lora_cls_labels", None, "classification heads are not supported"),
)

PARALLEL = (
    _no_effect("disable_custom_all_reduce", False, _ONE_DEVICE),
    _no_effect("ray_workers_use_nsight", False, _ONE_DEVICE),
    _no_effect("disable_nccl_for_dp_synchronization", None, _ONE_DEVICE, False),
    _no_effect("distributed_timeout_seconds", None, _ONE_DEVICE),
    _no_effect("master_addr", "127.0.0.1", _ONE_DEVICE),
    _no_effect("master_port", 29501, _ONE_DEVICE),
    _refused("tensor_parallel_size", 1, _ONE_DEVICE),
    _refused("pipeline_parallel_size", 1, _ONE_DEVICE),
    _refused("prefill_context_parallel_size", 1, _ONE_DEVICE),
    _refused("decode_context_parallel_size", 1, _ONE_DEVICE),
    _refused("dcp_comm_backend", "ag_rs", _ONE_DEVICE),
    _refused("dcp_kv_cache_interleave_size", 1, _ONE_DEVICE),
    _refused("cp_kv_cache_interleave_size", 1, _ONE_DEVICE),
    _refused("nnodes", 1, _ONE_DEVICE),
    _refused("node_rank", 0, _ONE_DEVICE),
    _refused("data_parallel_size", 1, _ONE_DEVICE),
    _refused("data_parallel_rank", None, _ONE_DEVICE),
    _refused("data_parallel_start_rank", None, _ONE_DEVICE),
    _refused("data_parallel_size_local", None, _ONE_DEVICE),
    _refused("data_parallel_address", None, _ONE_DEVICE),
    _refused("data_parallel_rpc_port", None, _ONE_DEVICE),
    _refused("data_parallel_hybrid_lb", False, _ONE_DEVICE),
    _refused("data_parallel_external_lb", False, _ONE_DEVICE),
    _refused("data_parallel_backend", "mp", _ONE_DEVICE),
    _refused("distributed_executor_backend", None, _ONE_DEVICE, "uni", "mp"),
    _refused("worker_cls", "auto", _ONE_DEVICE),
    _refused("worker_extension_cls", "", _ONE_DEVICE),
    _refused("enable_dbo", False, _ONE_DEVICE),
    _refused("ubatch_size", 0, _ONE_DEVICE),
    _refused("dbo_decode_token_threshold", 32, _ONE_DEVICE),
    _refused("dbo_prefill_token_threshold", 512, _ONE_DEVICE),
    _refused("enable_expert_parallel", False, _EXPERTS),
    _refused("enable_ep_weight_filter", False, _EXPERTS),
    _refused("enable_elastic_ep", False, _EXPERTS),
    _refused("enable_eplb", False, _EXPERTS),
    _refused("eplb_config", None, _EXPERTS, {}),
    _refused("expert_placement_strategy", "linear", _EXPERTS),
    _refused("moe_backend", "auto", _EXPERTS),
    _refused("all2all_backend", None, _EXPERTS, "allgather_reducescatter"),
)

MULTIMODAL = (
    _no_effect("mm_processor_cache_gb", 4, _MULTIMODAL),
    _no_effect("mm_processor_cache_type", "lru", _MULTIMODAL),
    _no_effect("mm_shm_cache_max_object_size_mb", 128, _MULTIMODAL),
    _no_effect("mm_encoder_tp_mode", "weights", _MULTIMODAL),
    _no_effect("mm_encoder_attn_backend", None, _MULTIMODAL),
    _no_effect("mm_encoder_attn_dtype", None, _MULTIMODAL),
    _no_effect("mm_tensor_ipc", "direct_rpc", _MULTIMODAL),
    _no_effect("disable_mm_preprocessor_cache", False, _MULTIMODAL),
    _no_effect("disable_chunked_mm_input", False, _MULTIMODAL),
    _no_effect("enable_multimodal_encoder_data_parallel", False, _MULTIMODAL),
    _no_effect("skip_mm_profiling", False, _MULTIMODAL),
    _no_effect("language_model_only", False, _MULTIMODAL),
    _refused("allowed_local_media_path", "", _MULTIMODAL),
    _refused("allowed_media_domains", None, _MULTIMODAL, []),
    _refused("limit_mm_per_prompt", None, _MULTIMODAL, {}),
    _refused("enable_mm_embeds", False, _MULTIMODAL),
    _refused("interleave_mm_strings", False, _MULTIMODAL),
    _refused("media_io_kwargs", None, _MULTIMODAL, {}),
    _refused("mm_processor_kwargs", None, _MULTIMODAL, {}),
    _refused("mm_encoder_only", False, _MULTIMODAL),
    _refused("mm_encoder_fp8_scale_path", None, _MULTIMODAL),
    _refused("mm_encoder_fp8_scale_save_path", None, _MULTIMODAL),
    _refused("mm_encoder_fp8_scale_save_margin", None, _MULTIMODAL),
    _refused("video_pruning_rate", None, _MULTIMODAL, 0),
)

OUTPUT = (
    _honoured(
        "record_trace",
        None,
        Kind.PATH,
        "new file for a trace of what the scheduler was told and decided, without texts or tokens, for `manylora sim`",
        ours=True,
    ),
    _no_effect("aggregate_engine_logging", False, _METRICS),
    _no_effect("show_hidden_metrics_for_version", None, _METRICS),
    _no_effect("kv_cache_metrics", False, _METRICS),
    _no_effect("kv_cache_metrics_sample", 0.01, _METRICS),
    _no_effect("enable_mfu_metrics", False, _METRICS),
    _no_effect("enable_logging_iteration_details", False, _METRICS),
    _no_effect("enable_mm_processor_stats", False, _METRICS),
    _no_effect("enable_layerwise_nvtx_tracing", False, "no trace ranges are marked"),
    _no_effect("allow_deprecated_quantization", False, _QUANTIZED),
    _refused("otlp_traces_endpoint", None, "traces are not exported"),
    _refused("collect_detailed_traces", None, "traces are not exported", []),
    _refused("profiler_config", None, "use the system's profiler", {}),
    _refused("structured_outputs_config", None, _STRUCTURED, {}, {"backend": "auto"}, {"backend": "guidance"}),
    _no_effect("guided_decoding_backend", None, _SOLE_GRAMMARS, "auto", "guidance"),
    _no_effect("guided_decoding_disable_fallback", None, _SOLE_GRAMMARS, False),
    _refused("guided_decoding_disable_any_whitespace", None, _STRUCTURED, False),
    _refused("guided_decoding_disable_additional_properties", None, _STRUCTURED, False),
    _refused("reasoning_parser", "", "outputs have all that was said; `manylora serve` splits it"),
    _refused("reasoning_parser_plugin", None, "outputs have all that was said; `manylora serve` splits it", ""),
    _refused("reasoning_config", None, "outputs have all that was said; `manylora serve` splits it", {}),
    _refused("speculative_config", None, _SPECULATIVE),
    _refused("spec_method", None, _SPECULATIVE),
    _refused("spec_model", None, _SPECULATIVE),
    _refused("spec_tokens", None, _SPECULATIVE),
)

SECTIONS: dict[str, tuple[Argument, ...]] = {
    "Model, tokenizer and outputs": MODEL,
    "Memory, scheduling and threads": MEMORY,
    "LoRA": LORA,
    "Several devices": PARALLEL,
    "Multimodal": MULTIMODAL,
    "Logging, structured output, speculation": OUTPUT,
}
ARGUMENTS: tuple[Argument, ...] = tuple(argument for section in SECTIONS.values() for argument in section)
BY_NAME: dict[str, Argument] = {argument.name: argument for argument in ARGUMENTS}


def markdown() -> str:
    """Return the table as the page `docs/llm-arguments.md`."""
    head = [
        "# Arguments of `LLM(...)`",
        "",
        "Every argument of vLLM's `LLM(...)` and of its engine arguments, and what ManyLoRA does with it. *Honoured*:",
        "it works. *Accepted without effect*: setting it logs one warning with the reason. *Refused*: setting it to",
        "anything but its default raises `ValidationError` with the reason. Arguments marked + are ManyLoRA's own.",
        "",
        "This page is the table that the code applies, written by",
        "`python -c 'from manylora import arguments; print(arguments.markdown(), end=\"\")' > docs/llm-arguments.md`.",
    ]
    return page(head, SECTIONS)


def page(head: Sequence[str], sections: Mapping[str, Sequence[Argument]], name: Callable[[str], str] = str) -> str:
    """Return a table of arguments as Markdown.

    Args:
        head: lines before the tables.
        sections: arguments by the title of their table.
        name: how an argument is spelled.

    """
    lines = list(head)
    for title, section in sections.items():
        lines += ["", f"## {title}", "", "| argument | default | treatment | |", "|---|---|---|---|"]
        for argument in section:
            shown = f"`{name(argument.name)}`" + (" +" if argument.ours else "")
            choices = f" ({' or '.join(argument.choices)})" if argument.choices else ""
            note = (argument.note + choices).replace("|", "\\|")
            lines.append(f"| {shown} | `{argument.default!r}` | {argument.treatment.value} | {note} |")
    return "\n".join(lines) + "\n"
