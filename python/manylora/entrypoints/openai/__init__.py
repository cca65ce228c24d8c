"""The OpenAI-compatible server, under the path that users of vLLM run."""
