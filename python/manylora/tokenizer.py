"""The model's tokenizer, with the few methods of transformers' tokenizers that callers of `get_tokenizer()` use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from manylora import _core


class Tokenizer:
    """`encode`, `decode`, `apply_chat_template`, `eos_token_id`, `vocab_size`, and calling it on a text."""

    def __init__(self, core: _core.Engine):
        self._core = core

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._core.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._core.decode(list(token_ids), skip_special_tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return `{"input_ids": [...]}`."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool = True, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str | list[int]:
        """Render a conversation; with `tokenize` as ids."""
        text = self._core.render_chat(
            json.dumps(messages), add_generation_prompt=add_generation_prompt, kwargs=json.dumps(kwargs)
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def eos_token_id(self) -> int | None:
        """The end token."""
        return self._core.eos_token_id()

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._core.tokenizer_size() or 0

    def __len__(self) -> int:
        return self.vocab_size
