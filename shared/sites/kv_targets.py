"""Where KV may go that one site computes for another."""

from __future__ import annotations

KV_FROM_SITES = "kv_from_sites/1"  # feature: takes KV that prefill workers of other sites push
