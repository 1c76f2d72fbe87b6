"""Where processes are, also those of other sites and those that have left."""

from __future__ import annotations

import pytest
from msgspec import structs

from services.gateway.receipts import places
from services.gateway.receipts.places import Places
from shared.messages import Heartbeat
from shared.receipts.receipt import PlacedProcess

BEAT = Heartbeat(
    process_id="decode-1",
    epoch=1,
    sequence_number=1,
    roles=("decode",),
    state="ready",
    interval_s=0.25,
    region="fr",
)


def known() -> Places:
    found = Places("gateway-1", "a", "eu", lambda site: {"b": "us"}.get(site, ""))
    found.observe(BEAT)
    return found


def test_processes_have_the_regions_that_they_announced() -> None:
    found = known()
    assert found.own == PlacedProcess(id="gateway-1", site="a", region="eu")
    assert found.of("decode-1") == PlacedProcess(id="decode-1", site="a", region="fr")
    found.observe(structs.replace(BEAT, state="stopped"))
    assert found.region_of("decode-1") == "fr"
    found.observe(structs.replace(BEAT, region=""))
    assert found.region_of("decode-1") == ""
    assert found.of("decode-9") == PlacedProcess(id="decode-9", site="a")


def test_another_site_names_its_processes_without_itself() -> None:
    found = known()
    there = PlacedProcess(id="b/decode-1", site="b", region="us")
    assert found.of("decode-1", "b") == found.of("b/decode-1") == there
    assert found.of("c/gateway/tiny", "b") == PlacedProcess(id="c/gateway/tiny", site="c")
    assert found.of("decode-1", "a").region == "fr"


def test_number_of_processes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_PROCESSES", 3)
    found = known()
    for number in range(9):
        found.observe(structs.replace(BEAT, process_id=f"worker-{number}"))
    assert found.region_of("gateway-1") == "eu"
    assert found.region_of("worker-8") == "fr"
    assert found.region_of("decode-1") == ""
