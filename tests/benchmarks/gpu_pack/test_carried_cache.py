"""Kernels that are compiled here are found on a machine with the same software, at any path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kernels.device import IS_INTERPRETED

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks.gpu_kit import sources
from benchmarks.gpu_kit.compiled import carried
from benchmarks.gpu_kit.compiled.carried_cache import (
    ARCHIVE,
    MANIFEST,
    Manifest,
    count_kernels,
    counting,
    differences,
    listening,
    modules_error,
    pack,
    software_of,
    unpack,
)
from benchmarks.gpu_kit.compiled.compile_ahead import CannotCompile, compiling_ahead
from benchmarks.gpu_kit.session import Session, Unavailable
from kernels.gpu.rows.rms_norm import rms_norm
from kernels.gpu.rows.silu_and_mul import silu_and_mul
from tests.benchmarks.gpu_pack.launched import launch
from tests.support.kernels.fake_driver import FakeDriver, fake_driver

ROOT = Path(__file__).parents[3]
COPIED = ("kernels", "benchmarks/gpu_kit", "tests/benchmarks", "tests/support/kernels")
NAMES = ["_gated_kernel", "_rms_norm_kernel", "_rms_norm_kernel"]


def launched(checkout: Path, cache: Path) -> dict[str, Any]:
    """Launches in a process of its own. Returns what it prints."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu_pack.launched"]
    environ = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack: the archive of three kernels, compiled ahead, and its manifest."""
    folder = tmp_path_factory.mktemp("pack")
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        counts = stack.enter_context(counting())
        fake = stack.enter_context(fake_driver("cubin"))
        stack.enter_context(compiling_ahead(fake, 2))
        launch()
        launch()
    assert (sorted(counts.compiled), fake.num_launches) == (NAMES, 6)
    pack(folder / "cache", folder / ARCHIVE)
    shutil.rmtree(folder / "cache")
    Manifest(software_of(90), {"smoke": 3}).write(folder / MANIFEST)
    return folder


def test_kernels_are_found_from_another_checkout(folder: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "elsewhere"
    for name in COPIED:
        shutil.copytree(ROOT / name, checkout / name)
    unpack(folder / ARCHIVE, tmp_path / "cache")
    assert count_kernels(tmp_path / "cache") == 3
    found = launched(checkout, tmp_path / "cache")
    assert Path(found["source"]).is_relative_to(checkout)
    assert (found["hits"], found["compiled"], found["built"]) == (3, [], 0)


def test_archive_holds_what_is_loaded_and_no_path(tmp_path: Path) -> None:
    """A group's file names the others; Triton needs their full paths."""
    kernel = tmp_path / "cache" / "HASH"
    kernel.mkdir(parents=True)
    names = ("k.cubin", "k.json", "k.ttgir", "launcher.so")
    for name in names:
        (kernel / name).write_text(name)
    paths = {name: str(kernel / name) for name in names[:3]}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    pack(tmp_path / "cache", tmp_path / ARCHIVE)
    unpack(tmp_path / ARCHIVE, tmp_path / "other")
    moved = tmp_path / "other" / "HASH"
    found = sorted(path.name for path in moved.iterdir())
    assert found == ["__grp__k.json", "k.cubin", "k.json", "launcher.so"]
    group = json.loads((moved / "__grp__k.json").read_text())["child_paths"]
    assert group == {name: str(moved / name) for name in names[:2]}


def carried_row(session: Session, folder: Path) -> dict[str, Any]:
    carried.run(session, str(folder))
    (row,) = session.rows_of("carried")
    return row


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return Session("carried", tmp_path / "rows.jsonl", mode="dry")


def test_pack_of_this_software_matches(folder: Path, session: Session, tmp_path: Path) -> None:
    row = carried_row(session, folder)
    assert (row["by_part"], row["differences"]) == ({"smoke": 3}, [])
    assert count_kernels(tmp_path / "cache") == 3


@pytest.mark.parametrize("key", ["triton", "triton_files", "backend", "variables", "modules"])
def test_difference_is_named(folder: Path, session: Session, tmp_path: Path, key: str) -> None:
    """Kernels are unpacked all the same: those that are not found only take room."""
    shutil.copy(folder / ARCHIVE, tmp_path)
    packed = Manifest.read(folder / MANIFEST)
    software = packed.software | {key: "another"}
    replace(packed, software=software).write(tmp_path / MANIFEST)
    (difference,) = carried_row(session, tmp_path)["differences"]
    assert difference.startswith(f"{key}: another was packed, ")


def test_changed_kernel_is_a_difference(folder: Path, tmp_path: Path) -> None:
    packed = Manifest.read(folder / MANIFEST).software
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    with patch.object(sources, "KERNELS", tmp_path / "kernels"):
        assert differences(packed, software_of(90)) == []
        with (tmp_path / "kernels/gpu/rows/rms_norm.py").open("a") as file:
            file.write("# changed\n")
        (difference,) = differences(packed, software_of(90))
    assert difference.startswith("sources: ")


def test_module_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    assert modules_error(tmp_path) == ""
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "cuda_utils.so").write_text("of another machine")
    assert modules_error(tmp_path).startswith("cuda_utils.so: ")


def test_absent_pack_is_unavailable(session: Session, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"scripts/gpu_pack makes it"):
        carried.run(session, str(tmp_path))


def test_kernel_that_no_device_can_launch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels are compiled all the same."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(FakeDriver, "max_shared_bytes", 8)
    large = torch.zeros(2, 4096)
    message = r"RuntimeError: _rms_norm_kernel needs \d+ bytes of 8 shared memory$"
    raised = pytest.raises(CannotCompile, match=message)
    with fake_driver("cubin") as fake, raised, compiling_ahead(fake, 2):
        rms_norm(large, large[0], 1e-5)
        silu_and_mul(large)
    assert count_kernels(tmp_path) == 2


def test_launches_of_all_threads_are_compiled_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiling: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(listening(lambda **_: compiling.append(current_thread().name)))
        fake = stack.enter_context(fake_driver("cubin"))
        thread = stack.enter_context(ThreadPoolExecutor(1))
        stack.enter_context(compiling_ahead(fake, 1))
        thread.submit(silu_and_mul, torch.zeros(2, 256)).result()
        silu_and_mul(torch.zeros(2, 512))
    assert [name.partition("_")[0] for name in compiling] == ["compile", "compile"]
    assert (fake.num_launches, count_kernels(tmp_path)) == (2, 2)
    assert not fake.compiled, "nothing is loaded"
