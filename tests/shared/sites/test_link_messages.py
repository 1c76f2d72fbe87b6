"""Messages between sites of other releases, and of other clocks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.messages import (
    AbortRequest,
    AckFinished,
    Alive,
    DecodeStarted,
    Message,
    ReadSiteModels,
    ReportAlive,
    ResendTokens,
    Served,
    SiteModels,
    SiteState,
    StartDecode,
    TokenBatch,
    TokenEntry,
)
from tests.services.scheduler.literals import submit_of

PLACEMENT = b"p" * 16
SENT: list[Message] = [
    SiteState(gateway_id="b/gw", epoch=1, sequence_number=1),
    StartDecode(placement_id=PLACEMENT, request=submit_of("r", gateway_id="b/gw").request),
    TokenBatch(
        worker_id="b/gw/00ff",
        entries=(
            TokenEntry(
                PLACEMENT, 0, 0, (1,), served=Served(num_cached_tokens=0, prefill_worker_id=None)
            ),
        ),
    ),
    ResendTokens(placement_id=PLACEMENT, choice_index=0, from_position=0),
    AckFinished(placement_ids=(PLACEMENT,)),
    AbortRequest(placement_id=PLACEMENT, reason="stop"),
    ReportAlive(),
    ReadSiteModels(),
    SiteModels(gateway_id="b/gw", models_id=b"", models=()),
    Alive(epoch=1, host="", uptime_s=0.0),
    DecodeStarted(placement_id=PLACEMENT, num_cached_tokens=0),
]


@pytest.mark.parametrize("message", SENT, ids=lambda each: type(each).__name__)
def test_fields_of_a_later_release_are_left_out(message: Message) -> None:
    sent: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    later = [*sent, 1] if isinstance(sent, list) else sent | {"of_a_later_release": [1]}
    more = msgspec.msgpack.encode(later)
    assert msgspec.msgpack.decode(more, type=type(message)) == message


def test_no_message_between_sites_has_a_time_of_day() -> None:
    """Their clocks may be hours apart."""
    schema = msgspec.json.schema(StartDecode | SiteModels | TokenBatch | Alive)
    names = {name for each in schema["$defs"].values() for name in each.get("properties", {})}
    assert len(names) > 80
    assert {each for each in names if each.endswith("_at") or "unix" in each} == set()
