"""What the kit says of its machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_kit.ceilings import CEILINGS, assumed, copy_rate
from benchmarks.gpu_kit.machine.device_facts import has_mps, runtime_of

GVISOR = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"
LINUX = "Linux version 6.8.0-50-generic (buildd@lcy02) #51-Ubuntu SMP"


@pytest.mark.parametrize(
    ("version", "command_line", "name"),
    [
        (GVISOR, "", "gVisor"),
        (LINUX, "console=ttyS0 pci=off virtio_mmio.device=4K@0xd0000000:5", "Firecracker"),
        (LINUX, "BOOT_IMAGE=/vmlinuz root=/dev/sda1", "bare"),
        ("", "", "unknown"),
    ],
)
def test_runtime_is_named(version: str, command_line: str, name: str) -> None:
    assert runtime_of(version, command_line) == name


def test_mps_runs_where_its_pipe_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not has_mps()
    (tmp_path / "control").touch()
    assert has_mps()


def test_ceilings_are_those_of_the_card() -> None:
    assert assumed("NVIDIA H100 80GB HBM3", "copy_bytes_s") == CEILINGS["H100"]["copy_bytes_s"]
    assert assumed("NVIDIA H200", "matmul_flops") == CEILINGS["H200"]["matmul_flops"]
    assert assumed("NVIDIA A100-SXM4-80GB", "copy_bytes_s") is None
    assert assumed("", "copy_bytes_s") is None


def test_unknown_card_is_judged_by_its_memory() -> None:
    """An H200's memory: 4.9 TB/s by clock and width."""
    properties = SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6144)
    assert copy_rate(properties) == pytest.approx(4.3e12, rel=0.02)
    assert copy_rate(SimpleNamespace()) is None
