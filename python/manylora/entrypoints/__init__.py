"""Entry points, under the paths that users of vLLM import."""
