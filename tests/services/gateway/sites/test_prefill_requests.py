"""Prefills of other sites, as this gateway takes them."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.sites.prefill_requests import (
    MAX_LEASE_S,
    check_prefill,
    chosen_prefill,
    site_prefill,
)
from services.gateway.sites.site_requests import site_request
from shared.block_hash import extend_packed
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import Heartbeat, WorkerLoad
from shared.numerics import Numerics
from shared.packing import pack_hashes
from shared.sites.kv_targets import networks_of
from tests.services.scheduler.literals import submit_of
from tests.support.records import model_card
from tests.support.world.site_prefills import run_prefill_of_site

COMMAND = run_prefill_of_site("a")


def prefill_worker(worker_id: str, num_tokens: int = 0, **fields: object) -> Heartbeat:
    made = Heartbeat(
        process_id=worker_id,
        epoch=1,
        sequence_number=1,
        roles=("prefill",),
        state="ready",
        interval_s=0.25,
        model=model_card(),
        load=WorkerLoad(step=1, step_budget_s=1.0, prefill_tokens_in_flight=num_tokens),
    )
    return msgspec.structs.replace(made, **fields)


def test_worker_with_the_fewest_tokens_computes() -> None:
    workers = [prefill_worker("p1", 300), prefill_worker("p2", 200)]
    assert chosen_prefill(COMMAND, workers, {}).process_id == "p2"
    assert chosen_prefill(COMMAND, workers, {"p2": 200}).process_id == "p1"


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "draining"},
        {"process_id": "c/gw/00ff"},
        {"model": None},
        {"model": model_card(revision="r2")},
        {"model": model_card(kv_format="bf16/b16")},
        {"model": model_card(numerics=Numerics("exact", "other", "uint8", "1"))},
        {"model": model_card(max_context_tokens=39)},
    ],
)
def test_worker_whose_kv_does_not_fit_is_not_chosen(fields: dict[str, object]) -> None:
    with pytest.raises(WorkerBusy, match="no prefill worker of this site fits 'm' now"):
        chosen_prefill(COMMAND, [prefill_worker("p1", **fields)], {})


def test_request_needs_the_features_of_the_worker() -> None:
    needing = run_prefill_of_site("a", needs=("grammar/1",))
    with pytest.raises(WorkerBusy):
        chosen_prefill(needing, [prefill_worker("p1")], {})
    able = prefill_worker("p2", model=model_card(features=("grammar/1",)))
    assert chosen_prefill(needing, [able], {}) is able


def test_prompt_goes_to_a_worker_in_the_regions_of_its_tenant() -> None:
    """This site may have workers in others, too."""
    outside = [prefill_worker("p1", region="us"), prefill_worker("p2")]
    inside = prefill_worker("p3", 300, region="fr")
    assert chosen_prefill(COMMAND, [*outside, inside], {}, {"fr", "de"}) is inside
    with pytest.raises(WorkerBusy):
        chosen_prefill(COMMAND, outside, {}, {"fr", "de"})


def test_site_may_ask_for_what_its_decode_workers_can_receive() -> None:
    networks = networks_of(["10.2.0.0/16"])
    check_prefill(COMMAND, networks)
    with pytest.raises(InvalidRequest, match=r"10.2.0.1 is in no network of --kv-networks"):
        check_prefill(COMMAND, networks_of(["10.3.0.0/16"]))
    with pytest.raises(InvalidRequest, match="token ids must be complete"):
        check_prefill(run_prefill_of_site("a", token_ids=bytes(5)), networks)
    with pytest.raises(InvalidRequest, match="KV between sites is encrypted"):
        check_prefill(run_prefill_of_site("a", link_key=None), networks)


def test_prefill_has_the_cache_of_the_tenant_of_its_site() -> None:
    """The same as a request that is decoded here, and no other."""
    request = submit_of("r", tenant_id="t", gateway_id="a/gw", num_prompt_tokens=40).request
    decoded = site_request(request, b"p" * 16, "gw", b"k")
    command = run_prefill_of_site(
        "a",
        cache_root=request.cache_root,
        token_ids=request.prompt_token_ids,
        num_public_blocks=2,
        public_root=bytes(16),
        lease_s=1e6,
        deadline_s=1e6,
    )
    made = site_prefill(command, "gw", b"k", block_size=16, max_deadline_s=600.0)
    assert (made.decode_worker_id, made.tenant_id) == ("gw", "a/t")
    assert made.cache_root == decoded.cache_root != command.cache_root
    assert made.block_hashes == pack_hashes(extend_packed(made.cache_root, made.token_ids, 16))
    assert (made.num_public_blocks, made.public_root) == (0, None)
    assert (made.lease_s, made.deadline_s) == (MAX_LEASE_S, 600.0)
    other = msgspec.structs.replace(command, decode_worker_id="c/decode-1")
    assert site_prefill(other, "gw", b"k", block_size=16, max_deadline_s=1).cache_root != (
        made.cache_root
    )
