"""`LoRARequest`: positional order, checks and identity of vLLM's class."""

from __future__ import annotations

import copy
import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
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


def test_tensors_and_strength_are_given_by_keyword() -> None:
    arrays, config = {"key": np.zeros((2, 2), "f4")}, {"r": 2}
    made = LoRARequest("name", 3, lora_tensors=arrays, peft_config=config, scale=0.5)
    assert (made.lora_path, made.path, made.scale) == ("", "", 0.5)
    assert made.lora_tensors is arrays
    assert made.peft_config is config
    assert json.loads(made.config_json()) == config
    assert LoRARequest("name", 3, "/path").scale == 1.0
    for scale in (0, 1, -2, np.float32(0.5), Fraction(1, 3)):
        assert LoRARequest("name", 3, "/path", scale=scale).scale == float(scale)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert twin == made
        assert twin.scale == 0.5
        assert np.array_equal(twin.lora_tensors["key"], arrays["key"])
    # Arrays are not printed.
    assert len(repr(made)) < 200
    with pytest.raises(TypeError):
        LoRARequest("name", 3, "/path", None, False, False, arrays)


ARRAY = np.zeros((2, 2), "f4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_path": "/p", "lora_tensors": {"k": ARRAY}, "peft_config": {}}, "not both"),
        ({"lora_tensors": {"k": ARRAY}}, "need a peft_config"),
        ({"lora_path": "/p", "peft_config": {}}, "peft_config goes with lora_tensors"),
        ({"peft_config": {}}, "peft_config goes with lora_tensors"),
        ({"lora_tensors": {}, "peft_config": {}}, "lora_tensors is empty"),
        ({"lora_tensors": [ARRAY], "peft_config": {}}, "lora_tensors must map keys"),
        ({"lora_tensors": {1: ARRAY}, "peft_config": {}}, "keys of lora_tensors must be strings, got 1"),
        ({"lora_tensors": {"k": ARRAY.tolist()}, "peft_config": {}}, r"lora_tensors\['k'\] is a list"),
        ({"lora_tensors": {"k": None}, "peft_config": {}}, r"lora_tensors\['k'\] is a NoneType"),
        ({"lora_tensors": {"k": ARRAY}, "peft_config": "LORA"}, "peft_config must be a mapping or have to_dict"),
        ({"lora_tensors": {"k": ARRAY}, "peft_config": {"r": object()}}, r"peft_config\['r'\] is not plain data"),
        ({"lora_tensors": {"k": ARRAY}, "peft_config": {"r": {1, "x"}}}, r"peft_config\['r'\] is not plain data"),
        ({"lora_tensors": {"k": ARRAY}, "peft_config": {"lora_alpha": float("nan")}}, r"peft_config\['lora_alpha'\]"),
        ({"lora_path": "/p", "scale": float("nan")}, "scale must be finite"),
        ({"lora_path": "/p", "scale": float("-inf")}, "scale must be finite"),
        ({"lora_path": "/p", "scale": 1e39}, "scale must be finite"),
        ({"lora_path": "/p", "scale": "1"}, "scale must be a number, got '1'"),
        ({"lora_path": "/p", "scale": True}, "scale must be a number, got True"),
        ({"lora_path": "/p", "scale": None}, "scale must be a number, got None"),
        ({"lora_path": "/p", "scale": 1j}, "scale must be a number"),
    ],
)
def test_tensors_and_strengths_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refusal:
        LoRARequest("name", 1, **fields)
    assert isinstance(refusal.value, ValueError)


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
