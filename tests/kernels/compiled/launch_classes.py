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

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kernels.support.ahead_of_time import WARP_SIZE, MachineCode, compiled_source

CAPABILITY = 90
OPTIONS = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")


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
        """All that tells it from other classes, the same with each release of Triton."""
        fixed = {path[0]: value for path, value in self.constants.items()}
        parts = [self.name, *(f"{name}={value}" for name, value in self.options.items())]
        for index, (name, kind) in enumerate(self.signature.items()):
            given = fixed.get(index, kind)
            is_aligned = bool(self.attributes.get((index,)))
            parts.append(f"{name}={given}{'/16' if is_aligned else ''}")
        return " ".join(parts)

    @cached_property
    def key(self) -> str:
        return blake2b(self.text.encode(), digest_size=5).hexdigest()

    def compiled(self) -> MachineCode:
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", CAPABILITY, WARP_SIZE)
        return compiled_source(source, target, self.options)


@contextmanager
def recording() -> Iterator[dict[str, LaunchClass]]:
    """Key -> class of each launch inside, none of which is compiled or runs."""
    found: dict[str, LaunchClass] = {}

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launched = LaunchClass(
            fn.jit_function,
            dict(compile["signature"]),
            dict(compile["constants"]),
            dict(compile["configs"][0]),
            {name: compile[name] for name in OPTIONS},
        )
        found[launched.key] = launched
        return True

    with patch.object(knobs.runtime, "jit_cache_hook", hook):
        yield found
