"""What `LLM.generate` returns, field for field as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manylora.lora.request import LoRARequest


@dataclass
class Logprob:
    """Log-probability of a token at one position.

    Attributes:
        logprob: natural logarithm of the probability (or the raw logit under `logprobs_mode="raw_logits"`).
        rank: 1 + the number of tokens that are more likely.
        decoded_token: the token as text.

    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the `n` samples of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: list[str] | None = None

    def finished(self) -> bool:
        """Whether the sample is complete."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When a request was submitted and when it was seen to have finished, as `time.time()` (to within 50 ms)."""

    arrival_time: float
    finished_time: float

    @property
    def seconds(self) -> float:
        """Seconds from submission to the end, waiting included."""
        return self.finished_time - self.arrival_time


@dataclass
class RequestOutput:
    """A request with its samples. `lora_request` echoes the adapter; None is the base."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = field(default=None)
    ec_transfer_params: dict[str, Any] | None = field(default=None)
    prompt_token_id_logprobs: Any = None
