"""The C modules of Triton 3.6 that are built here are found on a machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.device import IS_INTERPRETED

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

from kernels.gpu.rows.rms_norm import rms_norm
from tests.support.kernels.c_modules import (
    DRIVER_LIBRARY,
    HAS_LAUNCHERS,
    PLATFORM_KEYS,
    build_utilities,
)
from tests.support.kernels.fake_driver import fake_driver

if not HAS_LAUNCHERS:
    pytest.skip("this release of Triton needs no launchers", allow_module_level=True)


LOAD = """
import importlib.util, sys
for path in sys.argv[1:]:
    name = path.rpartition("/")[2].partition(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def launch() -> None:
    x = torch.zeros(2, 64)
    rms_norm(x, x[0], 1e-5)


def modules(cache: Path) -> set[str]:
    return {path.parent.name for path in cache.glob("*/*.so")}


def test_keys_depend_on_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        with fake_driver("cubin") as fake:
            launch()
            build_utilities()
        assert fake.built == {"__triton_launcher": 1, "cuda_utils": 1}
        found.append(modules(tmp_path / name))
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(PLATFORM_KEYS)


@pytest.mark.parametrize("key", PLATFORM_KEYS)
def test_modules_are_found_with_and_without_the_program_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Triton's key of a module says whether the program could be asked about Python's format."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fake_driver("cubin"):
        launch()
        build_utilities()
    monkeypatch.setattr(build, "platform_key", lambda: key)
    with fake_driver("cubin") as fake:
        launch()
        build_utilities()
    assert not fake.built


def test_driver_finds_its_utilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own driver, up to the load of the module."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fake_driver("cubin") as fake:
        build_utilities()
        fake.built.clear()
        with pytest.raises(AttributeError, match="PyCUtensorMap"):
            nvidia.CudaUtils()
    assert not fake.built


def driver_library(modules: list[Path], folder: Path) -> None:
    """Builds a library with the driver's symbols that the modules use."""
    listed = subprocess.check_output(["nm", "-D", "--undefined-only", *modules], text=True)
    names = {line.split()[-1] for line in listed.splitlines() if line}
    source = "".join(f"void {name}(void) {{}}\n" for name in names if name.startswith("cu"))
    command = ["gcc", "-shared", "-x", "c", "-", "-o", folder / DRIVER_LIBRARY]
    subprocess.run(command, input=source, text=True, check=True)


def test_modules_load_beside_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with fake_driver("cubin"):
        launch()
        build_utilities()
    built = list((tmp_path / "cache").glob("*/*.so"))
    driver_library(built, tmp_path)
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", LOAD, *map(str, built)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (len(built), done.returncode) == (2 * len(PLATFORM_KEYS), 0), done.stderr


def test_platform_is_one_of_those_built_for() -> None:
    assert build.platform_key() in PLATFORM_KEYS
