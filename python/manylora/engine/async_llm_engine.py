"""`AsyncLLMEngine`, which is `AsyncLLM`, as in vLLM."""

from manylora.async_llm import AsyncLLM
from manylora.engine.arg_utils import AsyncEngineArgs

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncEngineArgs", "AsyncLLMEngine"]
