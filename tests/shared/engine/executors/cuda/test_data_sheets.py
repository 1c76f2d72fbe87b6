from __future__ import annotations

from shared.engine.executors.cuda.data_sheets import data_sheet_peaks


def test_only_whole_known_gpus_have_peaks() -> None:
    peaks = data_sheet_peaks("NVIDIA H200")
    assert peaks is not None
    assert (peaks.bytes_per_s, peaks.operations_per_s) == (4.8e12, 989e12)
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H20", "Tesla T4", ""):
        assert data_sheet_peaks(name) is None
