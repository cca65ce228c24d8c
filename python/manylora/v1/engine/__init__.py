"""Engines, under the paths that users of vLLM import."""
