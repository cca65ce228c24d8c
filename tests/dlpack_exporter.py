"""Arrays that speak DLPack by hand: element types that numpy lacks, old and new capsules, and damaged ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

FLOAT, BFLOAT = 2, 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Unversioned(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype = ctypes.c_char_p
_name.argtypes = (ctypes.py_object,)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def name_of(capsule: Any) -> str:
    """What a capsule holds, and whether it was taken."""
    return str(_name(capsule).decode())


def content_of(capsule: Any) -> Unversioned | Versioned:
    """The structure in a capsule that nobody has taken."""
    kind = Versioned if name_of(capsule) == "dltensor_versioned" else Unversioned
    return kind.from_address(_pointer(capsule, _name(capsule)))


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, cut off."""
    return (np.ascontiguousarray(values, dtype="<f4").view("<u4") >> 16).astype("<u2")


class Exporter:
    """An array with every field of its structure at will; it counts what is made and given back.

    `old` exporters know no `max_version` and hand over the structure without a version.
    """

    def __init__(
        self,
        memory: bytes | np.ndarray,
        shape: Sequence[int],
        *,
        code: int = FLOAT,
        bits: int = 32,
        lanes: int = 1,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        device: tuple[int, int] = (1, 0),
        said_device: tuple[int, int] | None = None,
        old: bool = False,
        version: tuple[int, int] = (1, 0),
        with_deleter: bool = True,
        null: Sequence[str] = (),
        ndim: int | None = None,
    ):
        content = memory.tobytes() if isinstance(memory, np.ndarray) else memory
        self._memory = ctypes.create_string_buffer(content, max(len(content), 1))
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
        self._tensor = {
            "data": None if "data" in null else ctypes.addressof(self._memory),
            "device_type": device[0],
            "device_id": device[1],
            "ndim": len(shape) if ndim is None else ndim,
            "code": code,
            "bits": bits,
            "lanes": lanes,
            "byte_offset": offset,
        }
        self._null_shape = "shape" in null
        self._device = said_device or device
        self._version = version
        self._deleter = _Deleter(self._give_back) if with_deleter else None
        self._structures: dict[int, Any] = {}
        self.capsules: list[Any] = []
        self.given_back: list[int] = []
        if old:
            self.__dlpack__ = lambda: self._export(versioned=False)

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        return self._export(versioned=max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def _export(self, versioned: bool) -> Any:
        structure: Any = Versioned() if versioned else Unversioned()
        if versioned:
            structure.major, structure.minor = self._version
        for field, value in self._tensor.items():
            setattr(structure.tensor, field, value)
        if not self._null_shape:
            structure.tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if self._strides is not None:
            structure.tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        if self._deleter is not None:
            structure.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        address = ctypes.addressof(structure)
        self._structures[address] = structure
        capsule = _new_capsule(address, b"dltensor_versioned" if versioned else b"dltensor", None)
        self.capsules.append(capsule)
        return capsule

    def _give_back(self, address: int) -> None:
        self.given_back.append(address)
        del self._structures[address]
