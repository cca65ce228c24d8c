"""`LLM`, under the path that users of vLLM import."""

from manylora.llm import LLM

__all__ = ["LLM"]
