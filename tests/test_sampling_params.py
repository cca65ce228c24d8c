"""`SamplingParams`: names, defaults, order, limits and messages of vLLM's class."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

from manylora import RequestOutputKind, SamplingParams, StructuredOutputsParams, ValidationError
from manylora.sampling_params import REFUSED_WHEN_SET

NAN, INFINITY = float("nan"), float("inf")

# In vLLM's order.
FIELDS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None,
    "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None, "flat_logprobs": False,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "output_kind": RequestOutputKind.CUMULATIVE, "stream_interval": None,
    "skip_clone": False, "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None, "extra_args": None,
    "bad_words": None, "skip_reading_prefix_cache": None, "thinking_token_budget": None, "repetition_detection": None,
    "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
    # An older name, so that it can say what it is called now.
    "guided_decoding": None,
}  # fmt: skip

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"n": 1.5}, "n must be an integer, got 1.5"),
    ({"n": "2"}, "n must be an integer, got '2'"),
    ({"n": True}, "n must be an integer, got True"),
    ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1."),
    ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0."),
    ({"frequency_penalty": NAN}, "frequency_penalty must be in [-2, 2], got NaN."),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
    ({"repetition_penalty": INFINITY}, "repetition_penalty must be a finite number, got inf."),
    ({"temperature": -0.1}, "temperature must be non-negative, got -0.1."),
    ({"temperature": 2.5}, "temperature must be in [0, 2], got 2.5."),
    ({"temperature": NAN}, "temperature must be a finite number, got NaN."),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01."),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
    ({"top_k": 1.0}, "top_k must be an integer, got 1.0"),
    ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1."),
    ({"seed": 2**63}, f"seed is out of range, got {2**63}"),
    ({"stop": ["a", ""]}, "stop cannot contain an empty string. Got stop="),
    ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
    ({"stop": [5]}, "stop must be a string or a list of strings, got an item 5"),
    ({"stop": "a", "detokenize": False}, "stop strings are only supported when detokenize is True."),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids (integers from 0 up), got an item 'a'"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids (integers from 0 up), got an item -1"),
    ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, got 7"),
    ({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
    ({"max_tokens": 10**30}, "max_tokens is out of range"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1."),
    ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17."),
    ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
    ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1, got -2."),
    ({"logprobs": "all"}, "logprobs must be an integer, got 'all'"),
    ({"temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2."),
    ({"logit_bias": {"a": 1}}, "logit_bias keys must be token ids, got 'a'"),
    ({"logit_bias": {-4: 1}}, "logit_bias keys must be token ids from 0 up, got -4"),
    ({"logit_bias": {4: NAN}}, "logit_bias of token 4 must be a number, got NaN"),
    ({"logit_bias": [4]}, "logit_bias must be a dictionary from token id to bias, got [4]"),
    ({"bad_words": [""]}, "bad_words cannot contain an empty string."),
    ({"stream_interval": 0}, "stream_interval must be at least 1, got 0."),
]


def test_names_defaults_and_order_are_those_of_vllm() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == FIELDS
    assert list(parameters) == list(FIELDS)
    made = SamplingParams(2, 0.1, 0.2, 1.3, 0.4, None, 0.5, 6, 0.7, 8)
    assert (made.n, made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (2, 0.1, 0.2, 1.3)
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.seed) == (0.4, 0.5, 6, 0.7, 8)
    for name in FIELDS:
        assert hasattr(made, name), name
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=lambda value: str(value)[:40])
def test_values_out_of_range_are_refused_with_the_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        SamplingParams(**fields)
    assert str(refusal.value).startswith(message)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("name", REFUSED_WHEN_SET)
def test_fields_that_are_not_offered_raise_when_set(name: str) -> None:
    default, reason = REFUSED_WHEN_SET[name]
    assert getattr(SamplingParams(**{name: default}), name) == default
    with pytest.raises(ValidationError, match=f"^{name}=") as refusal:
        SamplingParams(**{name: True if default is False else {"some": 1} if default is None else 5})
    assert reason in str(refusal.value)


def test_performance_hints_are_accepted() -> None:
    made = SamplingParams(output_kind=RequestOutputKind.DELTA, stream_interval=4, skip_clone=True)
    assert (made.output_kind, made.stream_interval, made.skip_clone) == (RequestOutputKind.DELTA, 4, True)


def test_equal_meanings_are_stored_in_one_form() -> None:
    made = SamplingParams(seed=-1, stop="end", logprobs=True, prompt_logprobs=False, logit_bias={"5": 1000, 6: -1000})
    assert (made.seed, made.stop, made.logprobs, made.prompt_logprobs) == (None, ["end"], 1, None)
    assert made.logit_bias == {5: 100.0, 6: -100.0}
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(top_k=-1).top_k == -1


def test_numpys_numbers_are_numbers() -> None:
    made = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_k=np.int32(4), max_tokens=np.int64(7), seed=np.uint8(3),
        stop_token_ids=np.array([4, 5]), allowed_token_ids=[np.int64(6)], logit_bias={np.int64(3): np.float64(1.5)},
    )  # fmt: skip
    assert (made.n, made.temperature, made.top_k, made.max_tokens, made.seed) == (2, 0.5, 4, 7, 3)
    assert (made.stop_token_ids, made.allowed_token_ids, made.logit_bias) == ([4, 5], [6], {3: 1.5})
    assert all(type(value) is int for value in (made.n, made.top_k, made.seed, *made.stop_token_ids))


def test_low_temperatures_are_raised_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.001)
    assert params.temperature == 0.01
    assert params.clone() == params
    (record,) = caplog.records
    assert "0.001" in record.getMessage()
    assert "0.01" in record.getMessage()


def test_params_are_copied_pickled_compared_and_shown() -> None:
    made = SamplingParams(n=3, stop=["a"], logit_bias={4: 1.0}, seed=5)
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.clone()):
        assert twin == made
        assert twin is not made
    assert made.clone().stop is not made.stop
    assert made != SamplingParams(n=3)
    assert "n=3" in repr(made)
    assert "stop=['a']" in repr(made)
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)


def test_from_optional_takes_none_for_the_default() -> None:
    assert SamplingParams.from_optional(n=None, temperature=None, top_p=0.5) == SamplingParams(top_p=0.5)


STRUCTURED_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({}, "You must use one kind of structured outputs constraint but none are specified"),
    ({"json_object": False}, "You must use one kind of structured outputs constraint but none are specified"),
    (
        {"json": {}, "regex": "a"},
        "You can only use one kind of structured outputs constraint but multiple are specified: json, regex.",
    ),
    ({"choice": []}, "structured_outputs.choice cannot be empty"),
    ({"regex": ""}, "structured_outputs.regex cannot be empty"),
    ({"json": 5}, "json must be a JSON Schema as text or dictionary, got 5"),
    ({"json": {"a": {1}}}, "json cannot be written as JSON"),
    ({"grammar": 5}, "grammar must be a string, got 5"),
    ({"choice": [5]}, "choice must be a string or a list of strings, got an item 5"),
    ({"json_object": "yes"}, "json_object must be True or False, got 'yes'"),
    ({"structural_tag": "{}"}, "structural_tag is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), STRUCTURED_REFUSALS, ids=lambda value: str(value)[:40])
def test_structured_outputs_have_exactly_one_constraint(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        StructuredOutputsParams(**fields)
    assert str(refusal.value).startswith(message)


def test_structured_outputs_are_kept_copied_and_shown() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "integer"}

    outputs = StructuredOutputsParams(json=Model)
    assert outputs == StructuredOutputsParams(json={"type": "integer"})
    assert outputs.schema == '{"type": "integer"}'
    assert repr(outputs) == "StructuredOutputsParams(json={'type': 'integer'})"
    made = SamplingParams(structured_outputs=outputs)
    assert pickle.loads(pickle.dumps(made)) == made == made.clone()
    assert made != SamplingParams()
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == StructuredOutputsParams(regex="a+")
    for wrong, words in (({"regexp": "a"}, "has no field 'regexp'"), ("a", "must be StructuredOutputsParams, got 'a'")):
        with pytest.raises(ValidationError, match=words):
            SamplingParams(structured_outputs=wrong)
    with pytest.raises(ValidationError, match="give structured_outputs=StructuredOutputsParams"):
        SamplingParams(guided_decoding={"regex": "a"})
