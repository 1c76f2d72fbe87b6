"""The most that a GPU moves and computes each second, by its data sheet."""

from __future__ import annotations

from shared.messages import DevicePeaks

TERA = 1e12
# NVIDIA's data sheets, by the names that CUDA gives: TB/s of the memory, and TFLOP/s of the tensor
# cores in BF16, dense, with sums in FP32. A part of a GPU (MIG) has another name.
_GPUS = {
    "NVIDIA H100 80GB HBM3": (3.35, 989),
    "NVIDIA H100 PCIe": (2.0, 756),
    "NVIDIA H100 NVL": (3.9, 835),
    "NVIDIA H200": (4.8, 989),
    "NVIDIA H200 NVL": (4.8, 835),
    "NVIDIA A100-SXM4-80GB": (2.039, 312),
    "NVIDIA A100 80GB PCIe": (1.935, 312),
    "NVIDIA A100-SXM4-40GB": (1.555, 312),
    "NVIDIA A100-PCIE-40GB": (1.555, 312),
    "NVIDIA L40S": (0.864, 362),
    "NVIDIA L4": (0.3, 121),
    "NVIDIA A10": (0.6, 125),
    "NVIDIA GeForce RTX 4090": (1.008, 165),
    "NVIDIA GeForce RTX 3090": (0.936, 71),
}


def data_sheet_peaks(name: str) -> DevicePeaks | None:
    """Returns the peaks of the GPU with this name; None: it is not known."""
    if name not in _GPUS:
        return None
    moved, computed = _GPUS[name]
    return DevicePeaks(bytes_per_s=moved * TERA, operations_per_s=computed * TERA)
