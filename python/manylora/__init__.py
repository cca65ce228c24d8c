"""ManyLoRA: many LoRA fine-tunes on one base model, a different adapter for each row of one continuous batch.

The API is vLLM's: `LLM`, `SamplingParams`, `LoRARequest`, `RequestOutput`.
"""

from manylora._core import __version__
from manylora.exceptions import AdapterError, ManyLoRAError, ValidationError
from manylora.inputs import TextPrompt, TokensPrompt
from manylora.llm import LLM
from manylora.lora.request import LoRARequest
from manylora.outputs import CompletionOutput, Logprob, RequestOutput
from manylora.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AdapterError",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "ManyLoRAError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "ValidationError",
    "__version__",
]
