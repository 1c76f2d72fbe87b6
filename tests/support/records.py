"""Messages of which a test names only what it depends on."""

from __future__ import annotations

from typing import Any

from shared.kv_wire.link import FrameHeader, LinkEnd
from shared.kv_wire.ports.push_plan import plan_push
from shared.messages import ModelCard
from shared.numerics import Numerics

NUMERICS = Numerics("exact", "timing", "uint8", "1")  # the timing engine's


class PlannedLink:
    """The part of a `PushLink` that plans: a link within one host, which learns nothing."""

    plan = plan_push(LinkEnd(), LinkEnd(), is_local=True)

    def observe(self, num_bytes: int, seconds: float) -> None:
        pass


def model_card(**fields: Any) -> ModelCard:
    defaults = {
        "name": "m",
        "revision": "r1",
        "kv_format": "fp32/b16",
        "block_size": 16,
        "max_context_tokens": 4096,
        "vocab_size": 1000,
        "numerics": NUMERICS,
    }
    return ModelCard(**{**defaults, **fields})


def frame_header(payload_bytes: int, **fields: Any) -> FrameHeader:
    """Returns the header of a frame with one token of one layer and head."""
    defaults = {
        "placement_id": b"p" * 16,
        "sequence_number": 0,
        "first_token": 0,
        "num_tokens": 1,
        "first_layer": 0,
        "num_layers": 1,
        "first_head": 0,
        "num_heads": 1,
        "kv_format": "uint8/b1/l1/h1/d1",
        "num_cached_tokens": 0,
        "numerics": NUMERICS,
    }
    return FrameHeader(payload_bytes=payload_bytes, **{**defaults, **fields})
