"""Every argument of vLLM's `LLM(...)`, and what ManyLoRA does with it.

`ARGUMENTS` is the one table: *honoured*, *without effect* (accepted, one warning when set) or *refused* (accepted at its
default, an error with the reason otherwise). A test walks it, and the documentation is made from it.
"""

from __future__ import annotations

import difflib
import enum
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora import hub
from manylora.exceptions import ValidationError

logger = logging.getLogger("manylora")


class Treatment(enum.Enum):
    """What happens to an argument."""

    HONOURED = "honoured"
    WITHOUT_EFFECT = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Argument:
    """One argument of `LLM(...)`.

    Attributes:
        name: its name in vLLM, or ours.
        default: its default here.
        treatment: what happens to it.
        note: what it means here, or why it has no effect or is refused.
        same: further values that mean the same as the default.
    """

    name: str
    default: Any
    treatment: Treatment
    note: str
    same: tuple[Any, ...] = field(default=())


def _honoured(name: str, default: Any, note: str) -> Argument:
    return Argument(name, default, Treatment.HONOURED, note)


def _no_effect(name: str, default: Any, note: str) -> Argument:
    return Argument(name, default, Treatment.WITHOUT_EFFECT, note)


def _refused(name: str, default: Any, note: str, *same: Any) -> Argument:
    return Argument(name, default, Treatment.REFUSED, note, same)


NO_GPU = "this version computes on CPUs"
ONE_DEVICE = "one device is used"

ARGUMENTS: tuple[Argument, ...] = (
    _honoured("model", None, "local folder (Hugging Face layout), GGUF file, or hub id"),
    _honoured("tokenizer", None, "local folder, GGUF file or hub id; None = the model's own"),
    _honoured("tokenizer_revision", None, "hub revision of `tokenizer`"),
    _honoured("skip_tokenizer_init", False, "prompts are token ids, outputs have no text"),
    _honoured("revision", None, "hub revision of `model`"),
    _honoured("hf_token", None, "token for the hub"),
    _honoured("download_dir", None, "cache folder for the hub"),
    _honoured("served_model_name", None, "further names that the base answers to (string or list)"),
    _honoured("chat_template", None, "template text or file that replaces the model's"),
    _honoured("dtype", "auto", "auto, bfloat16, float32, float16 (computed in float32)"),
    _honoured("seed", 0, "seed of requests that bring none"),
    _honoured("max_model_len", None, "longest sequence; None = the model's context, lowered to what fits"),
    _honoured("max_num_seqs", 64, "sequences per step"),
    _honoured("max_num_batched_tokens", 2048, "rows per step"),
    _honoured("block_size", 16, "tokens per KV block"),
    _honoured("kv_cache_memory_bytes", None, "bytes shared by KV blocks and adapters; None = from free memory"),
    _honoured("enable_prefix_caching", True, "keep KV blocks for requests with the same prefix"),
    _honoured("enable_chunked_prefill", True, "prompts may be split over steps"),
    _honoured("scheduling_policy", "fcfs", "fcfs or priority"),
    _honoured("max_logprobs", 20, "most logprobs per token; -1 = the whole vocabulary"),
    _honoured("logprobs_mode", "raw_logprobs", "raw_logprobs or raw_logits"),
    _honoured("generation_config", "auto", "auto: sampling defaults of generation_config.json; vllm: none of them"),
    _honoured("enable_lora", False, "whether adapters can be used"),
    _honoured("max_lora_rank", 16, "largest rank accepted, any positive number; checked, never reserved"),
    _honoured("max_loras", None, "distinct adapters per step; None = no cap"),
    _honoured("max_cpu_loras", None, "resident adapters; None = unbounded"),
    _honoured("lora_memory_bytes", None, "bytes for adapters; None = elastic, shared with the KV cache"),
    _honoured("lora_root", None, "folder(s) that adapters must lie in; None = anywhere"),
    _honoured("lora_target_modules", None, "modules that adapters may touch; None = all"),
    _honoured("strict_base", False, "refuse adapters that name another base"),
    _honoured("num_threads", None, "compute threads; None = physical cores within affinity and quota"),
    _honoured("pin_threads", False, "pin compute threads to cores"),
    _honoured("disable_log_stats", True, "False prints the engine's counters when it is closed"),
    _honoured("use_tqdm_on_load", True, "show a progress bar while the model loads"),
    _no_effect("tokenizer_mode", "auto", "there is one tokenizer implementation, the fast one"),
    _no_effect("trust_remote_code", False, "no code of a checkpoint is ever run"),
    _no_effect("gpu_memory_utilization", 0.92, NO_GPU + "; use kv_cache_memory_bytes"),
    _no_effect("enforce_eager", False, "there are no captured graphs"),
    _no_effect("compilation_config", None, "nothing is compiled at start"),
    _no_effect("load_format", "auto", "the format is recognized"),
    _no_effect("swap_space", 0, "preempted sequences are recomputed"),
    _no_effect("cpu_offload_gb", 0, "weights are in host memory already"),
    _no_effect("lora_dtype", "auto", "adapters are stored in the model's dtype"),
    _no_effect("max_seq_len_to_capture", None, "there are no captured graphs"),
    _no_effect("disable_custom_all_reduce", False, ONE_DEVICE),
    _no_effect("disable_cascade_attn", False, "there is one attention implementation"),
    _no_effect("async_scheduling", None, "the engine decides"),
    _no_effect("long_prefill_token_threshold", 0, "chunks are sized by the token budget"),
    _no_effect("max_num_partial_prefills", 1, "chunks are sized by the token budget"),
    _no_effect("specialize_active_lora", False, "kernels do not depend on the number of adapters"),
    _no_effect("max_parallel_loading_workers", None, "loading uses the compute threads"),
    _refused("tensor_parallel_size", 1, ONE_DEVICE),
    _refused("pipeline_parallel_size", 1, ONE_DEVICE),
    _refused("data_parallel_size", 1, ONE_DEVICE),
    _refused("enable_expert_parallel", False, "mixture-of-experts models are not supported yet"),
    _refused("distributed_executor_backend", None, ONE_DEVICE, "uni", "mp"),
    _refused("quantization", None, "quantized checkpoints are recognized and dequantized at load", "auto"),
    _refused("kv_cache_dtype", "auto", "the KV cache has the model's dtype"),
    _refused("fully_sharded_loras", False, ONE_DEVICE),
    _refused("default_mm_loras", None, "multimodal models are not supported"),
    _refused("enable_tower_connector_lora", False, "multimodal models are not supported"),
    _refused("enable_mixed_moe_lora_format", False, "mixture-of-experts models are not supported yet"),
    _refused("enable_moe_shared_loras", False, "mixture-of-experts models are not supported yet"),
    _refused("max_lora_cls_labels", None, "classification heads are not supported"),
    _refused("hf_overrides", None, "the checkpoint's configuration is taken as it is", {}),
    _refused("hf_config_path", None, "the checkpoint's own configuration is used"),
    _refused("structured_outputs_config", None, "structured output is not supported yet"),
    _refused("logits_processors", None, "custom logits processors are not supported", []),
    _refused("speculative_config", None, "speculative decoding is not supported yet"),
    _refused("spec_method", None, "speculative decoding is not supported yet"),
    _refused("spec_model", None, "speculative decoding is not supported yet"),
    _refused("spec_tokens", None, "speculative decoding is not supported yet"),
    _refused("allowed_local_media_path", "", "multimodal models are not supported"),
    _refused("limit_mm_per_prompt", None, "multimodal models are not supported", {}),
    _refused("mm_processor_kwargs", None, "multimodal models are not supported", {}),
    _refused("override_pooler_config", None, "this engine generates; it has no pooling models"),
    _refused("pooler_config", None, "this engine generates; it has no pooling models"),
    _refused("runner", "auto", "this engine generates; it has no pooling models", "generate"),
    _refused("convert", "auto", "this engine generates; it has no pooling models", "none"),
    _refused("enable_sleep_mode", False, "weights stay in memory"),
    _refused("enable_prompt_embeds", False, "prompts are text or token ids"),
    _refused("kv_transfer_config", None, "KV blocks stay in this process"),
    _refused("kv_events_config", None, "KV blocks stay in this process"),
    _refused("model_impl", "auto", "there is one implementation", "vllm"),
    _refused("override_generation_config", None, "give SamplingParams instead", {}),
    _refused("disable_sliding_window", False, "a model's window is part of it"),
    _refused("device", "auto", NO_GPU, "cpu", None),
    _refused("task", "auto", "this engine generates; it has no pooling models", "generate"),
)

BY_NAME: dict[str, Argument] = {argument.name: argument for argument in ARGUMENTS}


class Settings:
    """The honoured arguments as attributes, checked and with defaults filled in."""

    model: str
    enable_lora: bool
    hf_token: str | bool | None
    generation_config: str
    disable_log_stats: bool
    use_tqdm_on_load: bool

    def __init__(self, **given: Any):
        for name in given:
            if name not in BY_NAME:
                near = difflib.get_close_matches(name, BY_NAME, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise ValidationError(f"LLM() has no argument `{name}`{hint}")
        for argument in ARGUMENTS:
            value = given.get(argument.name, argument.default)
            is_default = value is None or value == argument.default or value in argument.same
            if argument.treatment is Treatment.REFUSED and not is_default:
                raise ValidationError(
                    f"{argument.name}={value!r} is not supported: {argument.note}; leave it at {argument.default!r}"
                )
            if argument.treatment is Treatment.WITHOUT_EFFECT and not is_default:
                logger.warning("%s=%r has no effect: %s", argument.name, value, argument.note)
            if argument.treatment is Treatment.HONOURED:
                setattr(self, argument.name, argument.default if value is None else value)
        if not isinstance(self.model, (str, os.PathLike)) or not str(self.model):
            raise ValidationError(f"model must be a local path or a hub id, got {self.model!r}")
        self.model = str(self.model)

    def native(self) -> dict[str, Any]:
        """Resolve paths and hub ids, and return the dictionary that the native engine reads."""
        given: Any = self
        fetch = {"token": self.hf_token, "cache_dir": given.download_dir}
        model = hub.resolve(self.model, hub.MODEL_FILES, what="model", revision=given.revision, **fetch)
        tokenizer = given.tokenizer and hub.resolve(
            str(given.tokenizer), hub.MODEL_FILES, what="tokenizer", revision=given.tokenizer_revision, **fetch
        )
        served = given.served_model_name
        names = [served] if isinstance(served, str) else list(served or [])
        values = {
            "model": str(model),
            "model_names": [self.model.rstrip("/"), *names],
            "tokenizer": tokenizer and str(tokenizer),
            "chat_template": _template(given.chat_template),
            "dtype": str(given.dtype),
            "lora_roots": _roots(given.lora_root),
        }
        same = [
            "skip_tokenizer_init", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
            "kv_cache_memory_bytes", "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy",
            "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_memory_bytes", "lora_target_modules",
            "strict_base", "max_logprobs", "logprobs_mode", "seed", "num_threads", "pin_threads",
        ]  # fmt: skip
        return values | {name: getattr(self, name) for name in same}


def _template(template: str | None) -> str | None:
    if template is None or "{" in template or "\n" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ValidationError(f"chat_template `{template}` is neither a template text nor a file")
    return path.read_text(encoding="utf-8")


def _roots(root: Any) -> list[str] | None:
    if root is None:
        return None
    roots = [root] if isinstance(root, (str, os.PathLike)) else list(root)
    return [str(Path(item).expanduser().absolute()) for item in roots] + [str(hub.hub_cache())]
