"""Packed weights as bytes, and back: tensors over memory with another owner.

A weight packed for our GEMM kernels is an ordinary tensor. oneDNN's packed weights are opaque to
torch, which serialises them only for models compiled ahead of time (AOTInductor's C interface,
torch/csrc/inductor/aoti_torch/c/shim.h), which also store packed weights in a file. Without this
interface each process packs its weights privately.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from kernels.ops import CpuCompressed, Fp8Layout, GroupedLayout, QuantizedWeight, cpu_host

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_I64, _I32, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class PackedForm(msgspec.Struct, frozen=True, kw_only=True, tag="packed"):
    """A packed weight without its bytes; `description` is oneDNN's layout descriptor, if any.

    `shape` is the weight's, [N, K], for oneDNN, and that of the bytes otherwise.
    """

    shape: tuple[int, ...]
    dtype: str
    description: bytes


class CompressedForm(msgspec.Struct, frozen=True, kw_only=True, tag="compressed"):
    shape: tuple[int, int]
    order: Literal["tiles", "rows"]
    num_verbatim: int


class QuantizedForm(msgspec.Struct, frozen=True, kw_only=True, tag="quantised"):
    """The layout of a quantized weight, `grouped` or `fp8`, and the `dtype` of the dequantized
    weight.
    """

    grouped: GroupedLayout | None = msgspec.field(name="int4", default=None)  # as files have it
    fp8: Fp8Layout | None = None
    dtype: str


StoredForm = PackedForm | CompressedForm | QuantizedForm


def quantized_form(weight: QuantizedWeight) -> QuantizedForm:
    dtype = str(weight.dtype).removeprefix("torch.")
    if isinstance(weight.layout, GroupedLayout):
        return QuantizedForm(grouped=weight.layout, dtype=dtype)
    return QuantizedForm(fp8=weight.layout, dtype=dtype)


def quantized_view(form: QuantizedForm, memory: Tensor) -> QuantizedWeight:
    """Returns a quantized weight over `memory` [n] uint8, without a copy; it keeps `memory`
    alive.
    """
    layout = form.fp8 if form.grouped is None else form.grouped
    assert layout is not None
    return QuantizedWeight(layout, memory, getattr(torch, form.dtype))


def compressed_form(weight: CpuCompressed) -> CompressedForm:
    return CompressedForm(shape=weight.shape, order=weight.order, num_verbatim=weight.num_verbatim)


def compressed_view(form: CompressedForm, memory: Tensor) -> CpuCompressed:
    """Returns a compressed weight over `memory` [n] uint8, without a copy; it keeps `memory`
    alive.
    """
    return cpu_host().compressed_weight(form.shape, form.order, form.num_verbatim, memory)


def packed_bytes(weight: Tensor) -> tuple[PackedForm, Tensor]:
    """Returns the form of a packed weight, and its bytes, [n] uint8, which keep the weight
    alive.
    """
    ops, shape, dtype = torch.ops.mkldnn, tuple(weight.shape), _DTYPES[weight.dtype]
    if not weight.is_mkldnn:
        form = PackedForm(shape=shape, dtype=dtype, description=b"")
        return form, weight.view(-1).view(torch.uint8)
    description = bytes(ops._get_mkldnn_serialized_md(weight).numpy())
    form = PackedForm(shape=shape, dtype=dtype, description=description)
    memory = (ctypes.c_uint8 * ops._nbytes(weight)).from_address(ops.data_ptr(weight))
    data = torch.frombuffer(memory, dtype=torch.uint8)
    data.owner = weight  # type: ignore[attr-defined]
    return form, data


def packed_view(form: PackedForm, memory: Tensor) -> Tensor:
    """Returns a packed weight over `memory` [n] uint8, without a copy; it keeps `memory` alive."""
    if not form.description:
        return memory.view(getattr(torch, form.dtype)).view(form.shape)
    rows, columns = form.shape
    library, handle = _library(), _POINTER()
    status = library.aoti_torch_create_tensor_from_blob_v2(
        _POINTER(memory.data_ptr()),
        _I64(2),
        (_I64 * 2)(rows, columns),
        (_I64 * 2)(columns, 1),
        _I64(0),
        _I32(getattr(library, f"aoti_torch_dtype_{form.dtype}")()),
        _I32(library.aoti_torch_device_type_cpu()),
        _I32(0),
        ctypes.byref(handle),
        _I32(library.aoti_torch_layout__mkldnn()),
        form.description,
        _I64(len(form.description)),
    )
    if status != 0:
        raise RuntimeError(f"torch cannot create a packed weight from memory: status {status}")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [_POINTER, ctypes.c_char_p, _POINTER]
    weight: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(
        capsule(handle, None, None)
    )
    weight.owner = memory  # type: ignore[attr-defined]
    return weight


@cache
def can_share_packed() -> bool:
    """Whether packed weights can be shared; tested once, on a small weight."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.ones(2, 3)
    try:
        form, memory = packed_bytes(torch.ops.mkldnn._reorder_linear_weight(weight, None))
        view = packed_view(form, memory.clone())
        product = torch.ops.mkldnn._linear_pointwise(weight, view, None, "none", [], "")
    except (AttributeError, RuntimeError, OSError):
        return False
    return torch.equal(product, torch.full((2, 2), 3.0))


@cache
def _library() -> ctypes.CDLL:
    """Returns the library that torch has already loaded."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
