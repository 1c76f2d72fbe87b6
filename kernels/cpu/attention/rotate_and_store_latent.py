"""Computes the reference with the compiled norm: bits do not depend on the number of rows."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.layer.rms_norm import rms_norm
from kernels.reference.rotate_and_store_latent import rotate_and_store_normed


def rotate_and_store_latent(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: Tensor,
    eps: float,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See kernels.reference.rotate_and_store_latent."""
    normed = rms_norm(latent[:, : len(norm)], norm, eps)
    rotated = rotate_and_store_normed(
        *(query, normed, latent, cos, sin, kv_cache, slot_mapping), kv_scales=kv_scales
    )
    return rotated if out is None else out.copy_(rotated)
