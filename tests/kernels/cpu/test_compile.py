"""Processes that compile at the same time do not load each other's code."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

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


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no TBB from pip"
)
def test_threading_layer_is_tbb() -> None:
    """TBB's waiting threads leave their cores to other threads."""
    silu_and_mul(torch.ones(2, 4))
    assert numba.threading_layer() == "tbb"
