"""What Triton compiles kernels for: the launch classes of a worker's start, without compiling them.

A class is a kernel with the types, alignments and constants of its arguments. The product's own
start launches all of them on meta tensors (`compile_kernels`); here each launch is recorded instead
of compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kernels.support.ahead_of_time import OPTIONS, WARP_SIZE, MachineCode, compiled_source

CAPABILITY = 90


@dataclass(frozen=True)
class LaunchClass:
    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """As "gemm.linear._linear_kernel"."""
        return f"{self.kernel.__module__.removeprefix('kernels.gpu.')}.{self.kernel.__name__}"

    @cached_property
    def text(self) -> str:
        """All that tells it from other classes, the same with each release of Triton. An argument
        that has its default is left out, so that a kernel's rows stay when it learns an option.
        """
        fixed = {path[0]: value for path, value in self.constants.items()}
        parts = [self.name, *(f"{name}={value}" for name, value in self.options.items())]
        for index, (name, kind) in enumerate(self.signature.items()):
            given, param = fixed.get(index, kind), self.kernel.params[index]
            if param.has_default and index in fixed and given == param.default:
                continue
            is_aligned = bool(self.attributes.get((index,)))
            parts.append(f"{name}={given}{'/16' if is_aligned else ''}")
        return " ".join(parts)

    @cached_property
    def key(self) -> str:
        return blake2b(self.text.encode(), digest_size=5).hexdigest()

    @property
    def source(self) -> str:
        """A digest of the kernel and of all that it calls, and of the line on which it begins."""
        return str(self.kernel.cache_key[:16])

    def compiled(self) -> MachineCode:
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", CAPABILITY, WARP_SIZE)
        return compiled_source(source, target, self.options)


class _Recorded:
    """Stands for a kernel in Triton's cache of a device: launches find it there, and do nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...
    def run(self, *_: Any) -> None: ...


@contextmanager
def recording() -> Iterator[dict[str, LaunchClass]]:
    """Key -> class of each launch inside, none of which is compiled or runs. Wants a fake driver,
    whose devices no other launch has.
    """
    found: dict[str, LaunchClass] = {}
    recorded: Any = _Recorded()

    def record(
        self: JITFunction[Any],
        key: str,
        signature: dict[str, str],
        device: int,
        constants: dict[tuple[int, ...], Any],
        options: Any,
        attributes: dict[tuple[int, ...], Any],
        warmup: bool,
    ) -> Any:
        given = {name: getattr(options, name) for name in OPTIONS}
        chosen = {name: value for name, value in given.items() if value is not None}
        launched = LaunchClass(self, dict(signature), dict(constants), dict(attributes), chosen)
        found[launched.key] = launched
        self.device_caches[device][0][key] = recorded
        return recorded

    with patch.object(JITFunction, "_do_compile", record):
        yield found
