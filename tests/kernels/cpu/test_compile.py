"""Processes that compile at the same time do not load each other's code; other clones load it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

import kernels
from kernels.cpu.compile import cache_dir
from kernels.cpu.layer.fused_layer import share_of_rows
from kernels.ops import silu_and_mul

DTYPES = ("float32", "float64")
# Between reading and writing the index, a process waits until the other one has read it, too;
# this times out if a lock blocks the other one meanwhile.
SOURCE = """
import sys, time
from pathlib import Path
import numba, numpy as np
from numba.core.caching import IndexDataCacheFile
from kernels.cpu.compile import compiled

folder, dtype = Path(sys.argv[1]), sys.argv[2]
numba.config.CACHE_DIR = str(folder)
save_index = IndexDataCacheFile._save_index

def save_late(self, overloads):
    Path(folder, dtype).touch()
    until = time.monotonic() + 1
    while time.monotonic() < until and len(list(folder.glob("float*"))) < 2:
        time.sleep(0.01)
    save_index(self, overloads)

IndexDataCacheFile._save_index = save_late

@compiled()
def item_size(values):
    return values.itemsize

assert item_size(np.zeros(1, dtype)) == np.dtype(dtype).itemsize
print(sum(item_size.stats.cache_hits.values()))
"""


@pytest.mark.long
def test_concurrent_compilations_do_not_mix_up_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    module = tmp_path / "item_size.py"
    module.write_text(SOURCE)
    for num_loaded in ("0", "1"):
        processes = [
            subprocess.Popen(
                [sys.executable, str(module), str(tmp_path), dtype],
                stdout=subprocess.PIPE,
                text=True,
            )
            for dtype in DTYPES
        ]
        assert [each.communicate()[0].strip() for each in processes] == [num_loaded] * 2


@pytest.mark.long
def test_clone_at_another_path_loads_the_code(tmp_path: Path) -> None:
    """Its sources have the times of its own checkout."""
    first, end = share_of_rows(64, 0, 2)  # in the cache from now on
    source = Path(kernels.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "kernels", ignore=ignored, copy_function=shutil.copyfile)
    program = (
        "from kernels.cpu.layer.fused_layer import share_of_rows as share; "
        "print(share(64, 0, 2), *share.stats.cache_hits.values())"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": cache_dir()}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stdout == f"{(first, end)} 1\n", ran.stderr


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no TBB from pip"
)
def test_threading_layer_is_tbb() -> None:
    """TBB's waiting threads leave their cores to other threads."""
    silu_and_mul(torch.ones(2, 4))
    assert numba.threading_layer() == "tbb"
