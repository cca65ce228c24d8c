"""`LoRARequest`: which adapter a prompt is run with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from manylora.exceptions import ValidationError


@dataclass(eq=False)
class LoRARequest:
    """An adapter by name, integer id and path (or hub id), as in vLLM; the positional order is the same.

    Equality and hash go by name, as in vLLM. What counts for results is the adapter's content: the same name or id with
    other content is an error unless `load_inplace` asks for replacement.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without the adapter."""
        if not isinstance(self.lora_name, str) or not self.lora_name.strip():
            raise ValidationError(f"lora_name must be a non-blank string, got {self.lora_name!r}")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int):
            raise ValidationError(f"lora_int_id must be an integer, got {self.lora_int_id!r}")
        if self.lora_int_id < 1:
            raise ValidationError(f"id must be > 0, got {self.lora_int_id}")
        if self.lora_int_id >= 2**63:
            raise ValidationError(f"id must be below 2**63, got {self.lora_int_id}")
        if not isinstance(self.lora_path, (str, os.PathLike)):
            raise ValidationError(f"lora_path must be a path or a hub id, got {self.lora_path!r}")
        self.lora_path = str(self.lora_path)
        if not self.lora_path:
            raise ValidationError("lora_path cannot be empty")
        if self.is_3d_lora_weight:
            raise ValidationError("is_3d_lora_weight is for mixture-of-experts models, which are not supported yet")

    @property
    def adapter_id(self) -> int:
        """The integer id."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The path or hub id as given."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
