"""Triton's cache as an archive that can be loaded at another path and on another machine.

An archive holds the files that kernels are loaded from. A manifest beside it holds what Triton's
keys depend on; where that differs, `differences` names it, and kernels are compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.gpu_kit.sources import all_sources_digest

ARCHIVE, MANIFEST = "triton_cache.tar.xz", "manifest.json"  # names in the folder of a pack
LOADED = (".cubin", ".json", ".so")  # other files of the cache are for people
GROUP = "__grp__"  # begins the names of files that list the files of a kernel, with full paths


def pack(cache: Path, archive: Path) -> None:
    """Writes what kernels are loaded from, without the cache's path."""
    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(cache.glob("*/*")):
            if path.suffix in LOADED:
                _add(file, path.relative_to(cache), _with_names(path))


def unpack(archive: Path, cache: Path) -> None:
    """Adds an archive's kernels to a cache. Raises tarfile.TarError or OSError."""
    with tarfile.open(archive) as file:
        file.extractall(cache, filter="data")
    for path in sorted(cache.glob(f"*/{GROUP}*")):  # files are replaced meanwhile
        names = json.loads(path.read_text())["child_paths"]
        _write_group(path, {name: str(path.parent / name) for name in names})


def _with_names(path: Path) -> bytes:
    """Returns the content of a file of the cache. A group's has names for paths, of the files
    kept.
    """
    if not path.name.startswith(GROUP):
        return path.read_bytes()
    names = json.loads(path.read_text())["child_paths"]
    kept = {name: name for name in names if Path(name).suffix in LOADED}
    return json.dumps({"child_paths": kept}).encode()


def _write_group(path: Path, files: dict[str, str]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"child_paths": files}))
    temporary.replace(path)


def _add(file: tarfile.TarFile, name: PurePosixPath | Path, content: bytes) -> None:
    member = tarfile.TarInfo(str(name))
    member.size = len(content)
    file.addfile(member, BytesIO(content))


def modules_error(cache: Path) -> str:
    """Returns why this process cannot load the C modules of a cache, of which one of each name is
    tried; empty if it can. Triton builds those that cannot be loaded again, when they are needed.
    """
    by_name = {path.name: path for path in cache.glob("*/*.so")}
    for name, path in by_name.items():
        spec = spec_from_file_location(name.partition(".")[0], path)
        assert spec is not None and spec.loader is not None, "a file .so has a loader"
        try:
            spec.loader.exec_module(module_from_spec(spec))
        except ImportError as error:
            return f"{name}: {error}"
    return ""


def count_kernels(cache: Path) -> int:
    return len(list(cache.glob(f"*/{GROUP}*")))


@dataclass(frozen=True)
class Manifest:
    """The description of a cache of compiled kernels.

    For `software`, see `software_of`. `kernels` is the number of kernels that each part launches.
    """

    software: dict[str, str]
    kernels: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Manifest:
        found = json.loads(file.read_text())
        return cls(found["software"], found["kernels"])

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(vars(self), indent=1) + "\n")


def software_of(capability: int) -> dict[str, str]:
    """Returns the software that the keys of compiled kernels depend on. Imports Triton."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.cache import triton_key

    return {
        "triton": triton.__version__,
        "triton_files": hashlib.sha256(triton_key().encode()).hexdigest()[:16],
        "backend": CUDABackend(GPUTarget("cuda", capability, 32)).hash(),
        "variables": json.dumps(get_cache_invalidating_env_vars(), sort_keys=True),
        "modules": f"{platform.system()}{sysconfig.get_config_var('EXT_SUFFIX')}",
        "sources": all_sources_digest(),
    }


def differences(packed: dict[str, str], found: dict[str, str]) -> list[str]:
    """Says for each difference between two results of `software_of` what was packed."""
    return [
        f"{name}: {packed.get(name)} was packed, {found.get(name)} is here"
        for name in sorted(packed.keys() | found.keys())
        if packed.get(name) != found.get(name)
    ]


@dataclass
class Counts:
    """Kernels that Triton found in its cache, and those that it compiled, by name."""

    hits: int = 0
    compiled: list[str] = field(default_factory=list)

    @property
    def misses(self) -> int:
        return len(self.compiled)


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts the kernels that this process loads inside, each once. None without Triton."""
    counts, lock = Counts(), threading.Lock()
    if find_spec("triton") is None:
        yield counts
        return

    def count(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        with lock:
            counts.hits += cache_hit
            counts.compiled += [] if cache_hit else [metadata["name"]]

    with listening(count):
        yield counts


@contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """Calls `listener` for each kernel that Triton loads or compiles inside, on the thread that
    does; one set before is called first.
    """
    from triton import knobs

    before = knobs.compilation.listener
    listeners: Iterable[Callable[..., None]] = [before, listener] if before else [listener]

    def listen(**found: Any) -> None:
        for each in listeners:
            each(**found)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
