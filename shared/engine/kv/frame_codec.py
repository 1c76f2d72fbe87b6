"""The codec of KV over TCP, if the host has one."""

from __future__ import annotations

import structlog

from shared.background import item_error
from shared.errors import DependencyUnavailable
from shared.kv_wire.compression import FrameCodec

log = structlog.get_logger(__name__)

CODED_DTYPE = "bfloat16"


def load_codec(kv_compression: str, dtype: str) -> FrameCodec | None:
    """Returns the compiled codec. None for another dtype than BF16, if compression is off, or if
    the host cannot compile the codec.
    """
    if kv_compression == "off" or dtype != CODED_DTYPE:
        return None
    try:
        from shared.engine.kv.kv_codec import Bf16FrameCodec  # imports numba, not needed by others

        return Bf16FrameCodec()
    except DependencyUnavailable as error:  # a CPU executor has already warned
        log.info("kv_codec_unavailable", reason=error.message)
        return None
    except BaseException as raised:
        item_error(raised)
        log.exception("kv_codec_unavailable")
        return None
