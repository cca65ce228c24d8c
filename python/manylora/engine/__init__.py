"""The engine behind `LLM` and `AsyncLLM`, under the names that users of vLLM import."""

from manylora.engine.llm_engine import LLMEngine
from manylora.engine.manifest import read_manifest
from manylora.engine.submission import Request

__all__ = ["LLMEngine", "Request", "read_manifest"]
