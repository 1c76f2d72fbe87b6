"""Prefills that one site asks of another."""

from __future__ import annotations

from typing import Any

from shared.kv_layout import KvShard
from shared.messages import DataPlaneAddress, KvTarget, LinkKey, RunPrefill
from tests.support.records import NUMERICS

ADDRESS = DataPlaneAddress(host="10.2.0.1", port=7, unix_path="", instance_id=b"i")


def run_prefill_of_site(site: str, num_tokens: int = 40, **fields: Any) -> RunPrefill:
    """Returns the command of `{site}/decode-1` for a prompt of zeros."""
    defaults = {
        "request_id": "r",
        "placement_id": b"p" * 16,
        "tenant_id": "t",
        "decode_worker_id": f"{site}/decode-1",
        "model": "m",
        "revision": "r1",
        "kv_format": "fp32/b16",
        "cache_root": b"r" * 16,
        "token_ids": bytes(4 * num_tokens),
        "block_hashes": b"",
        "first_token": 0,
        "targets": (KvTarget(shard=KvShard(0, 1, 0, 1), address=ADDRESS),),
        "lease_s": 3.0,
        "deadline_s": 60.0,
        "numerics": NUMERICS,
        "link_key": LinkKey(key_id=bytes(16), key=bytes(32), security="aead"),
    }
    return RunPrefill(**{**defaults, **fields})
