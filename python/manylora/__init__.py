"""ManyLoRA: many LoRA fine-tunes on one base model, a different adapter for each row of one continuous batch.

The API is vLLM's: `LLM`, `AsyncLLM`, `LLMEngine`, `EngineArgs`, `SamplingParams`, `LoRARequest`, `RequestOutput`;
modules have its paths too (`manylora.engine.arg_utils`, `manylora.v1.engine.async_llm`, ...).
"""

from manylora import sim
from manylora._core import __version__
from manylora.async_llm import AsyncLLM
from manylora.engine.arg_utils import AsyncEngineArgs, EngineArgs
from manylora.engine.async_llm_engine import AsyncLLMEngine
from manylora.engine.llm_engine import LLMEngine
from manylora.exceptions import AdapterError, ManyLoRAError, ValidationError
from manylora.inputs import TextPrompt, TokensPrompt
from manylora.llm import LLM
from manylora.lora.request import LoRARequest
from manylora.merging import Merged, merge
from manylora.outputs import CompletionOutput, Logprob, RequestOutput
from manylora.planning import Plan, plan
from manylora.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "ManyLoRAError",
    "Merged",
    "Plan",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ValidationError",
    "__version__",
    "merge",
    "plan",
    "sim",
]
