"""Which workers get the pixels of a request."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.images.pixel_access import check_fetch
from shared.errors import InvalidRequest, OutsideRegions
from shared.messages import DataPlaneAddress, FetchPixels, Heartbeat
from shared.tenancy.refusals import Refusals

COMMAND = FetchPixels(
    worker_id="prefill-1",
    tenant_id="tenant-a",
    request_id="r",
    image_hash=bytes(16),
    shape=(1,),
    transfer_id=bytes(16),
    target=DataPlaneAddress(host="h", port=1, unix_path="", instance_id=b"i"),
    deadline_s=1.0,
)
HEARTBEAT = Heartbeat(
    process_id="prefill-1",
    epoch=1,
    sequence_number=1,
    roles=("prefill",),
    state="ready",
    interval_s=1.0,
    region="fr",
)


class OneHeartbeat:
    def __init__(self, heartbeat: Heartbeat | None) -> None:
        self._heartbeat = heartbeat

    def heartbeat_of(self, process_id: str) -> Heartbeat | None:
        return self._heartbeat


def check(heartbeat: Heartbeat | None, regions: frozenset[str] | None) -> Refusals:
    refusals = Refusals("fr")
    check_fetch(OneHeartbeat(heartbeat), refusals, COMMAND, regions)
    return refusals


@pytest.mark.parametrize("regions", [None, frozenset({"fr", "de"})])
def test_workers_in_the_regions_get_pixels(regions: frozenset[str] | None) -> None:
    assert not check(HEARTBEAT, regions).totals


def test_others_get_none() -> None:
    with pytest.raises(OutsideRegions):
        check(HEARTBEAT, frozenset({"us"}))
    with pytest.raises(InvalidRequest, match="no worker"):
        check(None, None)
    with pytest.raises(InvalidRequest, match="no worker"):
        check(msgspec.structs.replace(HEARTBEAT, roles=("scheduler",)), None)
