"""Compiles a wrapper's launches to machine code for an absent GPU.

Wrappers are called with tensors on the CPU; their launches are compiled instead of run, so nothing
is computed. Register and memory use is read from the machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import device as devices
from tests.kernels.support.async_operands import overwritten_operands

WARP_SIZE = 32
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # by compute capability, per program
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class MachineCode:
    name: str
    num_registers: int
    num_spilled_bytes: int  # to local memory: the stack of a thread
    num_local_loads: int
    num_overwritten: int  # products of which an operand is overwritten before they have read it
    shared_bytes: int
    # Generations of tensor-core instructions, and how many elements of K a register of an operand
    # holds: the compiler's choices that determine the bits of a product.
    dot_layouts: frozenset[str]
    num_wide_copies: int  # instructions that copy 16 bytes to shared memory asynchronously


@contextmanager
def compiling(capability: int) -> Iterator[list[MachineCode]]:
    """Compiles launches inside for compute capability 8.0 (80) or 9.0 (90)."""
    found: list[MachineCode] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(compiled(self, args, kwargs, capability))

    with (
        patch.object(JITFunction, "run", run),
        patch.object(devices, "compute_capability", lambda device: capability),
    ):
        yield found


def compiled(kernel: Any, args: tuple[Any, ...], kwargs: Any, capability: int) -> MachineCode:
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, args, strict=False)) | kwargs
    assert set(values) == set(names), set(values) ^ set(names)
    constants = {each.name for each in kernel.params if each.is_constexpr}
    constants |= {name for name, value in values.items() if value is None or value is True}
    constants |= {name for name, value in values.items() if type(value) is int and value == 1}
    source = ASTSource(
        kernel,
        signature={
            each.name: "constexpr"
            if each.name in constants
            else each.annotation_type or _type(values[each.name])
            for each in kernel.params
        },
        constexprs={name: values[name] for name in names if name in constants},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name not in constants and _is_aligned(values[name])
        },
    )
    code = compiled_source(source, GPUTarget("cuda", capability, WARP_SIZE), options)
    assert code.shared_bytes <= MAX_SHARED_BYTES[capability], kernel.__name__
    return code


def compiled_source(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> MachineCode:
    """Also a kernel that needs more shared memory than there is."""
    done = triton.compile(source, target=target, options=options)
    return MachineCode(
        source.fn.__name__,
        *_resources(done.asm["cubin"]),
        done.metadata.shared,
        frozenset(re.findall(r"versionMajor = \d+|kWidth = \d+", done.asm["ttgir"])),
        len(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10", done.asm["ptx"])),
    )


def _type(value: Any) -> str:
    match value:
        case torch.Tensor():
            return f"*{TYPES[value.dtype]}"
        case bool():
            return "i1"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        case float():
            return "fp32"
    raise TypeError(f"no kernel takes a {type(value)}")


def _is_aligned(value: Any) -> bool:
    """Whether the launcher treats it as aligned, which the compiler uses."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int, int, int]:
    """Registers, bytes of stack and loads from it, per thread; products with an operand that is
    overwritten too early.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _dumped("--dump-resource-usage", file.name)
        registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[-1]
        sass = _dumped("--dump-sass", file.name)
    num_loads = len(re.findall(r"\bLDL\b", sass)) if int(stack) else 0
    return int(registers), int(stack), num_loads, len(overwritten_operands(sass))


def _dumped(option: str, path: str) -> str:
    command = [str(CUOBJDUMP), option, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
