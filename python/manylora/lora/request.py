"""`LoRARequest`: which adapter a prompt is run with."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any

from manylora.exceptions import ValidationError

_LARGEST_FLOAT32 = 3.4028234663852886e38


@dataclass(eq=False)
class LoRARequest:
    """An adapter by name, integer id and path (or hub id), as in vLLM; the positional order is the same.

    An adapter may also be given in memory, without a file: `lora_tensors` and `peft_config` instead of `lora_path`. The
    arrays are copied when the adapter is loaded, never changed and never kept by the engine; to serve what they hold
    later, make a new request with `load_inplace=True`.

    Equality and hash go by name, as in vLLM. What counts for results is the adapter's content: the same name or id with
    other content is an error unless `load_inplace` asks for replacement.

    Args:
        lora_name: the adapter's name.
        lora_int_id: the adapter's integer id, from 1 on.
        lora_path: PEFT folder, hub id, or URL of a folder that fsspec reads (s3://, gs://, https://).
        base_model_name: echoed only.
        load_inplace: whether other content under this name replaces what is loaded.
        is_3d_lora_weight: not supported.
        lora_tensors: arrays on the CPU by the keys of `adapter_model.safetensors`: anything with `__dlpack__` (numpy,
            torch, jax), in float32, float16 or bfloat16, contiguous or not.
        peft_config: what `adapter_config.json` would say: a mapping, or anything with `to_dict()`, as PEFT's
            `LoraConfig`.
        scale: strength of the adapter for this request, times what its configuration says; 0 is exactly the base. The
            adapter is loaded once, whatever the strengths it is used with.

    Raises:
        ValidationError: a value is out of range, or path and tensors are given together.

    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    lora_tensors: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)
    peft_config: Any = field(default=None, kw_only=True, repr=False)
    scale: float = field(default=1.0, kw_only=True)
    # Stands for the arrays where a path stands for a folder: it says whether they were read already.
    _tensors_id: str = field(default="", init=False, repr=False)

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
        if self.lora_tensors is not None:
            self._check_tensors()
        elif self.peft_config is not None:
            raise ValidationError("peft_config goes with lora_tensors; a path has its own adapter_config.json")
        elif not self.lora_path:
            raise ValidationError("lora_path cannot be empty (or give lora_tensors and peft_config)")
        if isinstance(self.scale, bool) or not isinstance(self.scale, Real):
            raise ValidationError(f"scale must be a number, got {self.scale!r}")
        self.scale = float(self.scale)
        if not abs(self.scale) <= _LARGEST_FLOAT32:
            raise ValidationError(f"scale must be finite in float32, got {self.scale}")
        if self.is_3d_lora_weight:
            raise ValidationError("is_3d_lora_weight is for mixture-of-experts models, which are not supported yet")

    def _check_tensors(self) -> None:
        if self.lora_path:
            raise ValidationError(f"give lora_path or lora_tensors, not both; lora_path is {self.lora_path!r}")
        if not isinstance(self.lora_tensors, Mapping):
            kind = type(self.lora_tensors).__name__
            raise ValidationError(f"lora_tensors must map keys of adapter_model.safetensors to arrays, got {kind}")
        if not self.lora_tensors:
            raise ValidationError("lora_tensors is empty")
        for key, array in self.lora_tensors.items():
            if not isinstance(key, str):
                raise ValidationError(f"the keys of lora_tensors must be strings, got {key!r}")
            if not hasattr(array, "__dlpack__"):
                kind = type(array).__name__
                raise ValidationError(
                    f"lora_tensors[{key!r}] is a {kind}, which has no __dlpack__: give an array of numpy, torch or jax"
                )
        if self.peft_config is None:
            raise ValidationError("lora_tensors need a peft_config: what adapter_config.json would say")
        self.config_json()
        self._tensors_id = uuid.uuid4().hex

    def config_json(self) -> str:
        """Return `peft_config` as the text that `adapter_config.json` would hold.

        Raises:
            ValidationError: it is no mapping, or a value in it has no JSON; its key is named.

        """
        config = self.peft_config.to_dict() if hasattr(self.peft_config, "to_dict") else self.peft_config
        if not isinstance(config, Mapping):
            kind = type(config).__name__
            raise ValidationError(f"peft_config must be a mapping or have to_dict(), got {kind}")
        texts = {}
        for key, value in config.items():
            try:
                texts[json.dumps(str(key))] = json.dumps(value, default=_plain, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValidationError(f"peft_config[{key!r}] is not plain data: {error}") from error
        return "{" + ",".join(f"{key}:{text}" for key, text in texts.items()) + "}"

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
        """The path or hub id as given; empty for tensors."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


def _plain(value: Any) -> Any:
    """Return what PEFT writes for a value that JSON has no form for."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
