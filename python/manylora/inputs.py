"""Prompt dictionaries, under the names that users of vLLM import."""

from __future__ import annotations

from typing import TypedDict


class _Prompt(TypedDict, total=False):
    cache_salt: str
    tenant: str


class TextPrompt(_Prompt):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Prompt, total=False):
    """A prompt as token ids; `prompt` is only echoed."""

    prompt_token_ids: list[int]
    prompt: str
