"""`AsyncLLM`, under the path that users of vLLM import."""

from manylora.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
