"""A driver for Triton without a device: a launch takes the real path and ends before the GPU.

Triton binds and specialises the arguments, finds the kernel by its key, compiles new ones and calls
the launcher, all as for an H200. The launcher counts, and code is compiled only to an intermediate
form, which replaces the machine code. Tensors may be on the CPU: nothing reads them. So tests can
check what is compiled, how often something is launched, and the cost of a launch.

The form "cubin" is the machine code itself: Triton's cache then holds what a device loads, under
the same keys, and the modules through which Triton launches (see `c_modules`).

Works with Triton 3.6 to 3.9. Not for the interpreter, which has no driver.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver as drivers

from tests.support.kernels.c_modules import build_launcher, building

WARP_SIZE = 32
MAX_THREADS = 1024  # per program
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # limit of a program by compute capability
DEVICES_APART = 64

Form = Literal["ttir", "ttgir", "cubin"]
_first_device = count(1)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. `code` is its intermediate form: "ttir" as parsed, "ttgir" with layouts,
    or empty.
    """

    name: str
    code: str
    options: Any  # num_warps, num_stages, enable_fp_fusion, ... as attributes
    device: int


@dataclass
class FakeDriver(DriverBase):
    """A driver of Triton that compiles kernels and counts launches, but runs nothing.

    `compiled` lists kernels in order, also those in Triton's cache. `launches` counts launches by
    kernel and device, `built` the modules that the C compiler has built, by name.
    """

    form: Form = "ttir"
    capability: int = 90
    compiled: list[Compiled] = field(default_factory=list)
    launches: Counter[tuple[str, int]] = field(default_factory=Counter)
    built: Counter[str] = field(default_factory=Counter)
    # Triton caches compiled kernels by device for the process's lifetime, so each driver's devices
    # have unique ids.
    _base: int = field(default_factory=lambda: next(_first_device) * DEVICES_APART)
    _current: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=self._load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": self.max_shared_bytes},
        )

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    @property
    def max_shared_bytes(self) -> int:
        return MAX_SHARED_BYTES.get(self.capability, max(MAX_SHARED_BYTES.values()))

    def set_current_device(self, device: int) -> None:
        """Sets the calling thread's device, as in CUDA: a new thread is on device 0."""
        self._current.device = device

    def get_current_device(self) -> int:
        return self._base + getattr(self._current, "device", 0)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP_SIZE)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.capability, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("the fake driver computes nothing, so there is nothing to time")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    @classmethod
    def is_active(cls) -> bool:
        return False  # never chosen automatically

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Returns the launcher of one compiled kernel; called once, right before its
        code is loaded.
        """
        key = metadata.name, self.get_current_device() - self._base
        self._current.loading = metadata  # kernels may be loaded by several threads
        if self.form == "cubin":
            build_launcher(source, metadata)

        def launch(*_: Any) -> None:
            self.launches[key] += 1

        return launch

    def _load_binary(self, name: str, code: bytes, shared_bytes: int, device: int) -> Any:
        text = "" if self.form == "cubin" else code.decode()
        self.compiled.append(Compiled(name, text, self._current.loading, device - self._base))
        return object(), 0, 0, 0, MAX_THREADS


def _backend(form: Form) -> type[CUDABackend]:
    if form == "cubin":
        return CUDABackend

    class Shortened(CUDABackend):
        """Compiles up to `form`, whose text replaces the machine code."""

        def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
            super().add_stages(stages, options, language)
            passes = {name: stages[name] for name in ("ttir", "ttgir")[: 2 * (form == "ttgir")]}
            stages.clear()
            stages.update(passes or {"ttir": lambda module, metadata: module})
            stages["cubin"] = _finish

        def hash(self) -> str:
            """Returns a separate key in Triton's cache: this text must never be loaded
            as machine code.
            """
            return f"{form} instead of machine code, {self.target.arch}"

    return Shortened


def _finish(module: Any, metadata: dict[str, Any]) -> bytes:
    code = str(module)
    name = code.split("tt.func public @", 1)[1].split("(", 1)[0]
    metadata.update(name=name, shared=0)
    return code.encode()


@contextmanager
def fake_driver(form: Form = "ttir", *, capability: int = 90) -> Iterator[FakeDriver]:
    """Receives all launches inside. "ttir" is quick: a kernel is parsed, and not optimised."""
    fake = FakeDriver(form=form, capability=capability)
    nvidia = replace(backends["nvidia"], compiler=_backend(form))
    before = drivers._active
    with ExitStack() as stack:
        stack.enter_context(patch.dict(backends, nvidia=nvidia))
        if form == "cubin":
            stack.enter_context(building(fake.built))
        drivers.set_active(fake)
        try:
            yield fake
        finally:
            drivers._active = before
