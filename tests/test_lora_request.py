"""`LoRARequest`: positional order, checks and identity of vLLM's class."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from manylora import LoRARequest, ValidationError
from manylora.lora import request


def test_the_positional_order_is_vllms() -> None:
    made = LoRARequest("name", 3, "/path", "base", True)
    assert (made.lora_name, made.lora_int_id, made.lora_path) == ("name", 3, "/path")
    assert (made.base_model_name, made.load_inplace, made.is_3d_lora_weight) == ("base", True, False)
    assert (made.name, made.adapter_id, made.path) == ("name", 3, "/path")
    assert request.LoRARequest is LoRARequest
    assert LoRARequest("name", 3, Path("/path")).lora_path == "/path"


def test_names_identify() -> None:
    assert LoRARequest("a", 1, "/x") == LoRARequest("a", 2, "/y")
    assert LoRARequest("a", 1, "/x") != LoRARequest("b", 1, "/x")
    assert len({LoRARequest("a", 1, "/x"), LoRARequest("a", 2, "/y"), LoRARequest("b", 1, "/x")}) == 2
    made = LoRARequest("a", 1, "/x")
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert vars(twin) == vars(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("name", 0, "/path"), "id must be > 0, got 0"),
        (("name", -3, "/path"), "id must be > 0, got -3"),
        (("name", 1, ""), "lora_path cannot be empty"),
        (("name", 1), "lora_path cannot be empty"),
        (("", 1, "/path"), "lora_name must be a non-blank string"),
        (("  ", 1, "/path"), "lora_name must be a non-blank string"),
        ((None, 1, "/path"), "lora_name must be a non-blank string"),
        (("name", "1", "/path"), "lora_int_id must be an integer"),
        (("name", True, "/path"), "lora_int_id must be an integer"),
        (("name", 2**64, "/path"), "id must be"),
        (("name", 1, 5), "lora_path must be"),
        (("name", 1, "/path", None, False, True), "is_3d_lora_weight"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoRARequest(*arguments)
