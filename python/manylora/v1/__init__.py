"""Modules that users of vLLM import from `v1`."""
