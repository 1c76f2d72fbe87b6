"""Reads the model of a large body, and skips the rest, in some 0.5 ms for a MiB."""

from __future__ import annotations

import msgspec

from shared.transport.wire_errors import UNREADABLE


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None


class _DryRun(msgspec.Struct, frozen=True):
    request: _Body


_decoder = msgspec.json.Decoder(_Body)
_dry_run_decoder = msgspec.json.Decoder(_DryRun)


def named_model(data: bytes, kind: str) -> str | None:
    """`kind`: the name of the body's endpoint. None also for a body that is not valid: a
    preparation process finds the field at fault.
    """
    try:
        if kind == "dry_run":
            return _dry_run_decoder.decode(data).request.model
        return _decoder.decode(data).model
    except UNREADABLE:
        return None
