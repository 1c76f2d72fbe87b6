"""The check that Triton can run kernels, before a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.device import IS_INTERPRETED, TritonUnusable, check_triton

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.runtime.build import _build

from tests.support.kernels.fake_driver import fake_driver

CPU = torch.device("cpu")


def test_missing_c_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher(source: Any, metadata: Any) -> Any:
        """Builds like the CUDA driver: with the C compiler on the PATH."""
        (tmp_path / "launcher.c").write_text("#include <Python.h>\n")
        return _build("launcher", str(tmp_path / "launcher.c"), str(tmp_path), [], [], [])

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with fake_driver() as fake:
        fake.launcher_cls = launcher  # type: ignore[method-assign]
        with pytest.raises(TritonUnusable, match=r"on cpu: .*C compiler.*gcc and libc6-dev"):
            check_triton(CPU)


def test_kernel_without_output_is_detected() -> None:
    with fake_driver() as fake, pytest.raises(TritonUnusable, match=r"returned \[0, 1, .* 15\]"):
        check_triton(CPU)
    assert fake.num_launches == 1
