"""`LLMEngine`, under the path that users of vLLM import."""

from manylora.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
