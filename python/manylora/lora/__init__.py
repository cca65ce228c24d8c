"""Adapters, under the module names that users of vLLM import."""

from manylora.lora.request import LoRARequest

__all__ = ["LoRARequest"]
