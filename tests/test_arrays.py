"""Arrays in and out of the engine by DLPack: what is copied, what is lent, and who frees it."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeEngine, adapter_path
from dlpack_exporter import BFLOAT, FLOAT, Exporter, Unversioned, Versioned, content_of, name_of, to_bfloat16
from manylora import LLM, AdapterError

PROMPT = [5, 40, 99, 7, 130]
CONFIG = (Path(adapter_path("small")) / "adapter_config.json").read_text()


def tensors() -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(Path(adapter_path("small")) / "adapter_model.safetensors")


KEY = next(key for key in sorted(tensors()) if key.endswith("lora_A.weight"))


def version(llm: LLM, arrays: dict[str, Any]) -> str:
    """The content digest that arrays have as an adapter."""
    record = llm.llm_engine.core.load_adapter_tensors("x", 1, arrays, CONFIG, True, None)
    return record.version


def with_array(array: Any) -> dict[str, Any]:
    return tensors() | {KEY: array}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_arrays_of_every_type_and_either_generation_are_read(kind: str, old: bool, llm: LLM) -> None:
    values = tensors()[KEY]
    if kind == "bfloat16":
        stored = to_bfloat16(values)
        widened = (stored.astype("<u4") << 16).view("<f4")
        exporter = Exporter(stored, values.shape, code=BFLOAT, bits=16, old=old)
    else:
        stored = values.astype(kind)
        widened = stored.astype("f4")
        exporter = Exporter(stored, values.shape, code=FLOAT, bits=8 * stored.itemsize, old=old)
    expected = version(llm, with_array(widened))
    assert version(llm, with_array(exporter)) == expected
    assert (expected == version(llm, tensors())) == (kind == "float32")
    (capsule,) = exporter.capsules
    assert name_of(capsule) == ("used_dltensor" if old else "used_dltensor_versioned")
    assert len(exporter.given_back) == 1


def test_arrays_may_have_any_strides(llm: LLM) -> None:
    values = tensors()[KEY]
    rows, columns = values.shape
    expected = version(llm, tensors())
    wide = np.zeros((2 * rows, 3 * columns), "f4")
    wide[1::2, 2::3] = values
    reversed_both = np.ascontiguousarray(values[::-1, ::-1])
    views = {
        "column-major": np.asfortranarray(values),
        "transposed": np.ascontiguousarray(values.T).T,
        "stepped": wide[1::2, 2::3],
        "reversed": reversed_both[::-1, ::-1],
        "rows of a wider array": np.concatenate([values, values], axis=1)[:, :columns],
    }
    for name, view in views.items():
        assert not view.flags.c_contiguous, name
        assert np.array_equal(view, values), name
        assert version(llm, with_array(view)) == expected, name
    flat = values.astype("<f4").tobytes()
    for offset in (0, 1, 6, 64):
        assert version(llm, with_array(Exporter(b"x" * offset + flat, (rows, columns), offset=offset))) == expected
    explicit = Exporter(flat, (rows, columns), strides=(columns, 1))
    assert version(llm, with_array(explicit)) == expected
    # A stride of zero repeats one row.
    repeated = np.broadcast_to(values[:1], values.shape)
    assert version(llm, with_array(repeated)) == version(llm, with_array(np.ascontiguousarray(repeated))) != expected


def test_an_exporter_without_a_deleter_is_read(llm: LLM) -> None:
    values = tensors()[KEY]
    exporter = Exporter(values, values.shape, with_deleter=False)
    assert version(llm, with_array(exporter)) == version(llm, tensors())
    assert exporter.given_back == []


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 64}, "has elements of float64: convert it to float32, float16 or bfloat16"),
        ({"code": 0}, "has elements of int32"),
        ({"code": 10, "bits": 8}, "has elements of 8 bits of a type that DLPack numbers 10"),
        ({"code": BFLOAT, "bits": 32}, "has elements of bfloat32"),
        ({"lanes": 2}, "has elements of float32 in vectors of 2"),
        ({"lanes": 0}, "in vectors of 0"),
        ({"ndim": -1}, "damaged DLPack structure: -1 dimensions"),
        ({"ndim": 65}, "damaged DLPack structure: 65 dimensions"),
        ({"shape": (2, -32)}, "damaged DLPack structure: a dimension of -32"),
        ({"shape": (2**40, 2**40)}, "no memory holds"),
        ({"shape": (2**61,)}, "no memory holds|needs .* bytes"),
        ({"shape": (2**50,), "strides": (0,)}, "needs .* bytes, which are not free"),
        ({"shape": (1, 1), "strides": (2**62, 2**62)}, "damaged DLPack structure: a stride"),
        ({"null": ["data"]}, "damaged DLPack structure: no data"),
        ({"null": ["shape"]}, "damaged DLPack structure: no shape"),
        ({"device": (2, 0), "said_device": (1, 0)}, "is on a CUDA device"),
        # Shapes that can be read and fit no module.
        ({"shape": (64,)}, "shape"),
        ({"shape": (0, 32), "null": ["data"]}, "shape|rank"),
        ({"shape": ()}, "shape"),
    ],
)
def test_what_cannot_be_read_is_refused_by_key_and_given_back(fields: dict, message: str, old: bool, llm: LLM) -> None:
    values = tensors()[KEY]
    arguments = {"shape": values.shape} | fields
    exporter = Exporter(values, arguments.pop("shape"), old=old, **arguments)
    with pytest.raises(AdapterError, match=message) as refusal:
        version(llm, with_array(exporter))
    assert refusal.value.adapter == "x"
    assert refusal.value.keys == [KEY]
    assert f"`{KEY}`" in str(refusal.value)
    assert len(exporter.capsules) == len(exporter.given_back) == 1
    assert llm.llm_engine.list_loras() == set()


def test_a_later_major_version_is_given_back_unread(llm: LLM) -> None:
    values = tensors()[KEY]
    exporter = Exporter(values, values.shape, version=(2, 0), code=77)
    with pytest.raises(AdapterError, match=r"is of DLPack 2\.0; 1\.x is read"):
        version(llm, with_array(exporter))
    assert len(exporter.given_back) == 1
    # A later minor version has the same layout.
    assert version(llm, with_array(Exporter(values, values.shape, version=(1, 9)))) == version(llm, tensors())


@pytest.mark.parametrize(
    ("device", "name"),
    [((2, 1), "a CUDA device"), ((10, 0), "a ROCm device"), ((8, 0), "a Metal device"), ((99, 3), "cannot read")],
)
def test_arrays_on_other_devices_are_not_even_asked_for(device: tuple[int, int], name: str, llm: LLM) -> None:
    values = tensors()[KEY]
    exporter = Exporter(values, values.shape, device=device)
    with pytest.raises(AdapterError, match=rf"{name}.*type {device[0]}, number {device[1]}\): copy it to the CPU"):
        version(llm, with_array(exporter))
    assert exporter.capsules == []
    # Memory that is pinned for a device is the CPU's.
    assert version(llm, with_array(Exporter(values, values.shape, device=(3, 0)))) == version(llm, tensors())


def test_what_an_exporter_raises_is_named_with_the_key(llm: LLM) -> None:
    class Failing:
        def __init__(self, error: BaseException):
            self.error = error

        def __dlpack__(self, **_: Any) -> Any:
            raise self.error

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    for error in (BufferError("requires grad"), TypeError("requires grad")):
        with pytest.raises(AdapterError, match=rf"{KEY}` cannot be read through DLPack: \w+: requires grad") as refusal:
            version(llm, with_array(Failing(error)))
        assert refusal.value.keys == [KEY]
    with pytest.raises(KeyboardInterrupt):
        version(llm, with_array(Failing(KeyboardInterrupt())))
    with pytest.raises(AdapterError, match="float64"):
        version(llm, with_array(tensors()[KEY].astype("f8")))
    with pytest.raises(AdapterError, match="is a `list`, which has no `__dlpack__`"):
        version(llm, with_array(tensors()[KEY].tolist()))


def test_a_capsule_is_taken_once(llm: LLM) -> None:
    values = tensors()[KEY]
    exporter = Exporter(values, values.shape)
    version(llm, with_array(exporter))
    (used,) = exporter.capsules

    class Again:
        def __init__(self, capsule: Any):
            self.capsule = capsule

        def __dlpack__(self, **_: Any) -> Any:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    for capsule in (used, None, "text", np.dtype("f4")):
        with pytest.raises(AdapterError, match="no DLPack capsule, or one whose content somebody else has taken"):
            version(llm, with_array(Again(capsule)))
    assert len(exporter.given_back) == 1


def test_logits_are_lent_without_a_copy(make_engine: MakeEngine) -> None:
    llm = make_engine()
    array = llm.llm_engine.core.logits(PROMPT, [])
    assert (array.shape, array.dtype) == ((5, 288), "float32")
    assert repr(array) == "Array(shape=(5, 288), dtype=float32)"
    assert array.__dlpack_device__() == (1, 0)
    first, second = np.from_dlpack(array), np.from_dlpack(array)
    assert (first.shape, first.dtype, first.strides) == ((5, 288), np.dtype("f4"), (1152, 4))
    assert np.shares_memory(first, second)
    expected = first.copy()
    # It lives for as long as anybody reads it, whatever becomes of the engine.
    llm.close()
    del array, first
    gc.collect()
    assert np.array_equal(second, expected)
    assert len(set(expected.argmax(axis=1).tolist())) > 1


def test_an_exported_structure_is_complete(llm: LLM) -> None:
    array = llm.llm_engine.core.logits(PROMPT, [])
    values = np.from_dlpack(array)
    for arguments, kind in (
        ({}, Unversioned),
        ({"max_version": (0, 8)}, Unversioned),
        ({"max_version": (1, 1)}, Versioned),
    ):
        capsule = array.__dlpack__(**arguments)
        content = content_of(capsule)
        assert type(content) is kind
        tensor = content.tensor
        assert (tensor.device_type, tensor.device_id, tensor.ndim, tensor.byte_offset) == (1, 0, 2, 0)
        assert (tensor.code, tensor.bits, tensor.lanes) == (FLOAT, 32, 1)
        assert (tensor.shape[0], tensor.shape[1], tensor.strides[0], tensor.strides[1]) == (5, 288, 288, 1)
        assert tensor.data == values.ctypes.data
        assert content.deleter
        if isinstance(content, Versioned):
            assert (content.major, content.minor, content.flags) == (1, 0, 0)
    copied = content_of(array.__dlpack__(max_version=(1, 0), copy=True, dl_device=(1, 0)))
    assert isinstance(copied, Versioned)
    assert copied.flags == 2


def test_a_copy_is_the_readers_own(llm: LLM) -> None:
    array = llm.llm_engine.core.logits(PROMPT, [])
    shared = np.from_dlpack(array)

    class Copying:
        def __dlpack__(self, **arguments: Any) -> Any:
            return array.__dlpack__(**(arguments | {"copy": True}))

        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

    own = np.from_dlpack(Copying())
    assert np.array_equal(own, shared)
    assert not np.shares_memory(own, shared)


@pytest.mark.parametrize("arguments", [{"stream": 1}, {"dl_device": (2, 0)}, {"dl_device": (1, 1)}])
def test_what_an_array_cannot_do_is_a_buffer_error(arguments: dict[str, Any], llm: LLM) -> None:
    with pytest.raises(BufferError):
        llm.llm_engine.core.logits(PROMPT, []).__dlpack__(**arguments)


def test_what_nobody_takes_is_freed(llm: LLM) -> None:
    array = llm.llm_engine.core.logits(list(range(3, 203)), [])
    resident = []
    for _ in range(400):
        # 230 kB each.
        array.__dlpack__(copy=True)
        array.__dlpack__(max_version=(1, 0), copy=True)
        np.from_dlpack(llm.llm_engine.core.logits(PROMPT, []))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[-1] < resident[50] + 4 * 1024 * 1024


def test_other_libraries_exchange_arrays_with_the_engine(llm: LLM) -> None:
    values = np.from_dlpack(llm.llm_engine.core.logits(PROMPT, []))
    expected = version(llm, tensors())
    # Whichever of them is there; numpy always is.
    for library in ("numpy", "torch"):
        if importlib.util.find_spec(library) is None:
            continue
        module = importlib.import_module(library)
        theirs = {key: module.from_dlpack(value.copy()) for key, value in tensors().items()}
        assert version(llm, theirs) == expected, library
        lent = module.from_dlpack(llm.llm_engine.core.logits(PROMPT, []))
        assert np.array_equal(np.asarray(lent), values), library
        if library == "torch":
            half = {key: value.to(module.bfloat16) for key, value in theirs.items()}
            widened = {key: value.to(module.float32) for key, value in half.items()}
            assert version(llm, half) == version(llm, widened) != expected
            transposed = {key: value.T.contiguous().T for key, value in theirs.items()}
            assert version(llm, transposed) == expected
