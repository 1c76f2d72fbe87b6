"""The fake driver launches like Triton does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.device import IS_INTERPRETED, on_triton_compile

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from triton import knobs
from triton.runtime.errors import OutOfResources

from kernels.gpu.rows.rms_norm import rms_norm
from tests.support.kernels.fake_driver import FakeDriver, fake_driver


def launch(num_rows: int, hidden: int = 64) -> None:
    rms_norm(torch.zeros(num_rows, hidden), torch.zeros(hidden), 1e-5)


def test_each_key_is_compiled_once() -> None:
    with fake_driver() as fake:
        for num_rows in (1, 2, 64, 255):  # the grid is not part of the key
            launch(num_rows)
        assert (len(fake.compiled), fake.num_launches) == (1, 4)
        launch(1, hidden=96)
        assert [each.name for each in fake.compiled] == ["_rms_norm_kernel"] * 2
    with fake_driver() as another:
        launch(1)
        assert len(another.compiled) == 1, "drivers do not share compiled kernels"


def test_thread_launches_on_its_current_device() -> None:
    with fake_driver() as fake, ThreadPoolExecutor(1) as thread:
        fake.set_current_device(1)
        launch(1)
        thread.submit(launch, 1).result()
    assert fake.launches == {("_rms_norm_kernel", 1): 1, ("_rms_norm_kernel", 0): 1}


def test_handler_is_called_before_a_kernel_is_compiled() -> None:
    with fake_driver() as fake, knobs.runtime.scope():
        num_compiled_before: list[int] = []
        on_triton_compile(lambda: num_compiled_before.append(len(fake.compiled)))
        launch(1)
        launch(2)
        launch(1, hidden=96)
    assert num_compiled_before == [0, 1]
    assert len(fake.compiled) == 2


def test_machine_code_is_left_in_tritons_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the metadata that a device's driver loads it by."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fake_driver("cubin") as fake:
        launch(1)
        launch(2)
    assert [each.name for each in fake.compiled] == ["_rms_norm_kernel"]
    assert fake.num_launches == 2
    (metadata,) = tmp_path.glob("*/_rms_norm_kernel.json")
    assert json.loads(metadata.read_text())["target"]["arch"] == 90
    assert metadata.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF")


def test_launch_needs_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(FakeDriver, "max_shared_bytes", 8)
    with fake_driver("cubin"), pytest.raises(OutOfResources, match="Hardware limit: 8"):
        launch(1, hidden=4096)
