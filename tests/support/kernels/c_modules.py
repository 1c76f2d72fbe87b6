"""Builds the C modules through which Triton launches, without a GPU's driver.

Triton 3.6 compiles a launcher for each signature and one module of utilities, and keeps them in its
cache beside the kernels; later releases launch every signature with the utilities. Both are linked
to a stub of the driver's library and never loaded here. Where they are loaded, they must name that
library: Python resolves all symbols of a module at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

HAS_LAUNCHERS = hasattr(nvidia, "make_launcher")
DRIVER_LIBRARY = "libcuda.so.1"
# Compilers of some distributions drop a library of which the module needs no symbol, as of a stub.
NEEDED = ("-Wl,--no-as-needed", f"-l:{DRIVER_LIBRARY}")
# What Triton's keys of modules name: its `architecture` is empty where the program `file` is not
# installed.
PLATFORM_KEYS = ("x86_64,Linux,64bit,ELF", "x86_64,Linux,64bit,")


def build_launcher(source: Any, metadata: Any) -> None:
    """Builds the launcher of a kernel's signature, unless Triton's cache has it."""
    if HAS_LAUNCHERS:
        nvidia.CudaLauncher(source, metadata)


def build_utilities() -> None:
    """Builds the module that loads kernels, unless Triton's cache has it."""
    if HAS_LAUNCHERS:
        nvidia.compile_module_from_src(
            src=Path(nvidia.dirname, "driver.c").read_text(),
            name="cuda_utils",
            library_dirs=nvidia.library_dirs(),
            include_dirs=nvidia.include_dirs,
            libraries=nvidia.libraries,
        )


@contextmanager
def building(built: Counter[str]) -> Iterator[None]:
    """Inside, Triton's modules need no driver. Counts the runs of the C compiler by module."""
    if not HAS_LAUNCHERS:
        yield
        return
    compile_module = build._build

    def counted(name: str, source: str, folder: str, *options: Any) -> str:
        _add_stub(stub)
        *others, flags = options
        module: str = compile_module(name, source, folder, *others, [*flags, *NEEDED])
        built[name] += 1
        _put_under_all_keys(Path(source).read_text(), name, Path(module).read_bytes())
        return module

    with ExitStack() as stack:
        stub = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.object(nvidia, "library_dirs", lambda: [str(stub)]))
        stack.enter_context(patch.object(build, "_load_module_from_path", _not_loaded))
        stack.enter_context(patch.object(build, "_build", counted))
        yield


def _put_under_all_keys(source: str, name: str, module: bytes) -> None:
    for key in PLATFORM_KEYS:
        cache = get_cache_manager(hashlib.sha256((source + key).encode()).hexdigest())
        cache.put(module, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")


def _not_loaded(name: str, path: str) -> Any:
    return SimpleNamespace(launch=None)


def _add_stub(folder: Path) -> None:
    """An empty library with the name of the driver's, for the linker."""
    target = folder / DRIVER_LIBRARY
    if target.exists():
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
    command = [compiler, "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{DRIVER_LIBRARY}"]
    subprocess.run([*command, "-o", str(target)], check=True)
