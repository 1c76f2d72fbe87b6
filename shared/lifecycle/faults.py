"""What the gateway of a local cluster and `hearth up` say to each other about planned faults: one
JSON line each way, over a unix socket in the cluster's private directory.

`hearth up` alone owns the processes and sends the signals; a gateway that is started in another way
has no socket.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FREEZE_S = 30.0
MAX_LINE_BYTES = 16_384
Fault = Literal["kill", "freeze"]
Text = Annotated[str, Meta(max_length=256)]


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without a `fault` it only asks for the workers. `token` is that of the cluster's gateway."""

    token: Text
    fault: Fault | None = None
    worker_id: Text = ""


class FaultReply(msgspec.Struct, frozen=True, kw_only=True):
    """`worker_ids` may be killed and frozen. An empty `error` means that it is done."""

    worker_ids: tuple[str, ...] = ()
    error: str = ""
