"""What a site sends to others, and what they make of it."""

from __future__ import annotations

import msgspec
import pytest

from shared.allowance import Allowance
from shared.errors import OutsideRegions, Overloaded, SenderMismatch
from shared.lifecycle.health import Fleet, Loss
from shared.messages import (
    AbortRequest,
    Heartbeat,
    RoleDemand,
    SchedulerLoad,
    SiteCounters,
    SiteLoad,
    SiteModel,
    SiteModels,
    SiteState,
    StartDecode,
    WorkerLoad,
    WorkerRole,
)
from shared.regions.region_check import RegionCheck
from shared.sites.site_states import ModelState, models_id, models_of_sites, site_models
from shared.sites.site_workers import (
    CHANGES_S,
    GONE_S,
    MAX_MODELS_PER_S,
    MAX_SITE_MODELS,
    SiteWorkers,
)
from shared.subjects import at_site, command, owner_of, sender_of
from shared.transport.sender_check import SenderCheck
from tests.services.scheduler.literals import submit_of
from tests.support.records import model_card

CARD = model_card(max_context_tokens=1000)
STATE = "hearth.v1.linked.b.gateway.gw.-.state.eu.gw.-"


def heartbeat(process_id: str, number: int = 1, **fields: object) -> Heartbeat:
    beat = Heartbeat(
        process_id=process_id,
        epoch=1,
        sequence_number=number,
        roles=("decode",),
        state="ready",
        interval_s=0.25,
        model=CARD,
        load=WorkerLoad(
            step=1, step_budget_s=1.0, num_free_blocks=10, num_total_blocks=20, num_running=2
        ),
    )
    return msgspec.structs.replace(beat, **fields)


def state(*models: ModelState, number: int = 1, **fields: object) -> SiteState:
    made = SiteState(
        gateway_id="b/gw",
        epoch=7,
        sequence_number=number,
        region="eu",
        models_id=models_id(each.model for each in models),
        loads=tuple(each.load for each in models),
        counters=tuple(each.counters for each in models),
    )
    return msgspec.structs.replace(made, **fields)


def learned(*models: ModelState) -> SiteWorkers:
    """Returns workers that know the models of gateway b/gw."""
    workers = SiteWorkers()
    assert workers.learn(told(*models), 0.0)
    return workers


def told(*models: ModelState, gateway_id: str = "b/gw") -> SiteModels:
    cards = tuple(each.model for each in models)
    return SiteModels(gateway_id=gateway_id, models_id=models_id(cards), models=cards)


def site(*heartbeats: Heartbeat) -> tuple[ModelState, ...]:
    fleet = Fleet("own")
    for each in heartbeats:
        fleet.observe(each, 0.0)
    return site_models(fleet)


def test_workers_of_one_model_are_summed() -> None:
    larger = model_card(max_context_tokens=2000)
    (found,) = site(heartbeat("d1"), heartbeat("d2", model=larger))
    assert found.model.card == larger
    assert (found.load.num_free_blocks, found.load.num_total_blocks) == (20, 20)
    assert (found.load.num_running, found.load.num_engines) == (2, 2), "of the mean worker"


def test_gateways_share_what_is_free_and_nothing_is_while_requests_wait_for_it() -> None:
    """The fleet is that of a gateway: there are two with the other one."""
    gateway = heartbeat("g2", roles=("gateway",), model=None, load=None)
    (found,) = site(heartbeat("d1"), gateway)
    assert found.load.num_free_blocks == 5
    (found,) = site(heartbeat("d1"), queue("decode"))
    assert (found.load.num_free_blocks, found.load.num_waiting) == (0, 3)


def test_requests_that_wait_for_time_are_work_and_close_no_site() -> None:
    """A site that was closed until its next state would be idle for most of a second."""
    (found,) = site(heartbeat("d1"), heartbeat("d2"), queue("prefill"))
    assert (found.load.num_free_blocks, found.load.prefill_tokens_in_flight) == (20, 450)


def queue(role: WorkerRole) -> Heartbeat:
    """Three requests wait, for a worker of this role."""
    demand = RoleDemand(model=CARD.name, role=role, num_queued_requests=3, num_queued_tokens=900)
    load = SchedulerLoad(demands=(demand,))
    return heartbeat("s", roles=("scheduler",), model=None, load=None, scheduler=load)


def test_work_is_that_of_the_mean_worker_that_does_it() -> None:
    """Two workers decode, and one computes prompts for both."""
    waiting = WorkerLoad(step=1, step_budget_s=1.0, num_waiting=2, num_running=4)
    computing = WorkerLoad(step=1, step_budget_s=1.0, prefill_tokens_in_flight=900)
    prefill = heartbeat("p1", roles=("prefill",), load=computing)
    (found,) = site(heartbeat("d1", load=waiting), heartbeat("d2"), prefill)
    assert (found.load.num_running, found.load.num_waiting) == (3, 1)
    assert found.load.prefill_tokens_in_flight == 900


def test_a_site_does_not_pass_on_what_other_sites_serve() -> None:
    assert site(heartbeat("c/gw/00ff"), heartbeat("d1", state="draining")) == ()


def test_a_model_that_is_gone_is_a_worker_that_stopped() -> None:
    fleet, models = Fleet("own"), site(heartbeat("d1"))
    workers = learned(*models)
    (there,) = workers.heartbeats(state(*models), 0.0)
    assert (there.process_id.rpartition("/")[0], there.region) == ("b/gw", "eu")
    assert fleet.observe(there, 0.0) is None
    (gone,) = workers.heartbeats(state(number=2), 0.0)
    assert fleet.observe(gone, 1.0) is Loss.STOPPED
    assert workers.heartbeats(state(number=3), 0.0) == []


def test_models_are_known_by_the_digest_of_their_cards() -> None:
    """Whatever the order in which workers join, or which of a model's cards comes first."""
    other = model_card(name="other")
    first = site(heartbeat("d1"), heartbeat("d2", model=other))
    again = site(heartbeat("d2", model=other), heartbeat("d1"))
    workers = learned(*first)
    assert workers.knows_models(state(*again))
    assert not workers.knows_models(state(*first[:1]))
    assert not workers.knows_models(state(*first, gateway_id="b/gw2"))
    short = msgspec.structs.replace(state(*first), loads=(SiteLoad(),))
    assert not workers.knows_models(short), "fewer loads than its models"
    assert workers.knows_models(state()), "nothing to know"


def test_a_flood_of_states_is_refused_and_a_site_is_heard_again() -> None:
    allowed = Allowance(MAX_MODELS_PER_S, 1.0, 0.0)
    assert sum(allowed.takes(1001, 0.0) for _ in range(100)) == 4
    assert sum(allowed.takes(1001, 1.0 + tick / 100) for tick in range(100)) <= 9
    assert all(allowed.takes(1001, 10.0 + tick) for tick in range(10))


def test_a_site_is_lost_after_missed_states_and_not_before() -> None:
    """The fleet judges once a second of its own echoes has passed."""
    fleet, lost_at, models = Fleet("own"), {}, site(heartbeat("d1"))
    workers = learned(*models)
    for tick in range(100):
        now = tick / 10
        fleet.observe(heartbeat("own", tick), now)
        if tick % 10 == 0 and now <= 3:
            for each in workers.heartbeats(state(*models, number=tick + 1), now):
                fleet.observe(each, now)
        lost_at |= {process: now for process, _ in fleet.tick(now)}
    (worker_id,) = lost_at
    assert 6.9 < lost_at[worker_id] < 7.3, "four states after the one at 3 s"


def test_names_and_subjects_of_processes_at_a_site() -> None:
    subject = command("decode", "b/gw.i/00ff", "start")
    assert subject == "hearth.v1.site.b.decode.gw.i.start"
    assert owner_of(subject) == "b/gw.i"
    assert command("gateway", "a/gw", "tokens") == "hearth.v1.site.a.gateway.gw.-.tokens"
    assert sender_of("hearth.v1.linked.b.decode.gw.-.start.sch.i") == "b/sch.i"
    assert sender_of("hearth.v1.decode.d.-.start.sch.-") == "sch"
    assert at_site("b", "gw.i") == "b/gw.i"


def checked(message: msgspec.Struct, wire_subject: str) -> None:
    SenderCheck().checked(lambda _: message, wire_subject)(b"")


def test_a_site_speaks_only_for_itself() -> None:
    checked(state(), STATE)
    with pytest.raises(SenderMismatch, match="b/gw sent a SiteState that names c/gw"):
        checked(state(gateway_id="c/gw"), STATE)
    with pytest.raises(SenderMismatch, match="site b claims the region us; that of its link is eu"):
        checked(state(region="us"), STATE)
    check, reasons = SenderCheck(), list[tuple[str, str]]()
    check.refused_sites.on_state = lambda *reason: reasons.append(reason)
    with pytest.raises(SenderMismatch, match="that of its link is eu"):
        check.checked(lambda _: state(region=""), STATE)(b"")
    assert reasons == [("b", "site b claims the region none; that of its link is eu")]
    request = submit_of("r").request
    start = "hearth.v1.linked.b.decode.gw.-.start.sch.-"
    for owner in ("a/gw", "gw", "bb/gw", "b/", "b/.gw", "b/gw.", "b/gw/00ff"):
        asked = msgspec.structs.replace(request, gateway_id=owner)
        with pytest.raises(SenderMismatch, match=f"site b sent a request of {owner}"):
            checked(StartDecode(placement_id=b"p" * 16, request=asked), start)
    own = msgspec.structs.replace(request, gateway_id="b/gw")
    checked(StartDecode(placement_id=b"p" * 16, request=own), start)
    checked(AbortRequest(placement_id=b"p" * 16, reason="stop"), start.replace("start", "control"))


def test_refused_data_of_a_site_is_that_of_its_tenant() -> None:
    """This site may have a tenant of the same name."""
    regions, refused = RegionCheck(), list[str]()
    regions.on_refused = refused.append
    request = msgspec.structs.replace(
        submit_of("r", tenant_id="acme").request, gateway_id="b/gw", region_class="eu"
    )
    message = StartDecode(placement_id=b"p" * 16, request=request)
    decode = SenderCheck(regions=regions).checked(
        lambda _: message, "hearth.v1.linked.b.decode.gw.-.start.sch.-"
    )
    with pytest.raises(OutsideRegions, match="came on a subject of ''"):
        decode(b"")
    assert refused == ["b/acme"]


def test_counters_of_a_state_without_any_are_those_before() -> None:
    models = site(heartbeat("d1", load=WorkerLoad(step=1, step_budget_s=1.0, num_busy_steps=7)))
    workers = learned(*models)
    bare = state(*models, number=2, counters=())
    (unknown,) = workers.heartbeats(bare, 0.0)
    (known,) = workers.heartbeats(state(*models, number=3), 0.0)
    (again,) = workers.heartbeats(msgspec.structs.replace(bare, sequence_number=4), 0.0)
    steps = [each.load and each.load.num_busy_steps for each in (unknown, known, again)]
    assert steps == [0, 7, 7]


def test_states_of_300_sites_are_small() -> None:
    """Each site with two gateways and four models."""
    load = SiteLoad(
        num_running=40, num_free_blocks=10**5, num_total_blocks=10**6,
        prefill_tokens_in_flight=10**5, decode_tokens_in_flight=10**6,
    )  # fmt: skip
    models = [ModelState(SiteModel(CARD), load, SiteCounters())] * 4
    made = state(*models, epoch=2**62, counters=(), gateway_id="site-1/gateway.0123456789ab")
    assert 600 * (len(msgspec.msgpack.encode(made)) + 100) < 180_000


def test_a_site_that_offers_prefill_is_a_second_worker() -> None:
    """Its speed is that of the workers that prefill, and a request needs their features."""
    both, other = ("prefill", "decode"), model_card(features=("grammar/1",))
    busy = WorkerLoad(step=1, step_budget_s=1.0, num_computed_prompt_tokens=8, num_total_blocks=1)
    fleet = Fleet("own")
    for each in (
        heartbeat("d1"),
        heartbeat("w1", roles=both, model=CARD, load=busy),
        *(heartbeat(name, roles=("prefill",), model=other, load=busy) for name in ("p1", "p2")),
        heartbeat("c/gw/00ff", roles=("prefill",), model=other, load=busy),
    ):
        fleet.observe(each, 0.0)
    assert [each.model.role for each in site_models(fleet)] == ["decode"]
    found = site_models(fleet, offers_prefill=True)
    assert found[1].model == SiteModel(other, "prefill")
    decodes, prefills = learned(*found).heartbeats(state(*found), 0.0)
    assert (decodes.roles, prefills.roles) == (("decode",), ("prefill",))
    assert decodes.process_id != prefills.process_id
    assert prefills.model == other and prefills.load is not None
    assert (prefills.load.num_engines, prefills.load.num_computed_prompt_tokens) == (2, 8)


def test_state_that_a_newer_one_has_overtaken_changes_nothing() -> None:
    (model,) = site(heartbeat("d1"))
    workers = learned(model)
    (newer,) = workers.heartbeats(state(model, number=3), 0.0)
    assert workers.heartbeats(state(number=2), 0.0) == []
    (stopped,) = workers.heartbeats(state(number=4), 0.0)
    assert (newer.state, stopped.state, stopped.sequence_number) == ("ready", "stopped", 4)


def test_gateway_that_drains_lists_its_models_and_takes_no_work() -> None:
    fleet = Fleet("own")
    (model,) = site(heartbeat("d1"))
    (drains,) = learned(model).heartbeats(state(model, is_draining=True), 0.0)
    fleet.observe(drains, 0.0)
    assert [*fleet.live("decode")] == []
    assert fleet.is_live(drains.process_id)


def many(num: int, revision: str = "r1") -> list[ModelState]:
    (found,) = site(heartbeat("d1"))
    cards = (msgspec.structs.replace(CARD, name=f"m{n}", revision=revision) for n in range(num))
    return [found._replace(model=SiteModel(each)) for each in cards]


def test_a_site_has_no_more_models_than_its_share() -> None:
    """Gateways that have gone make room for those that follow them."""
    workers = SiteWorkers()
    assert workers.learn(told(*many(MAX_SITE_MODELS - 1)), 0.0)
    more = many(5)
    assert not workers.learn(told(*more, gateway_id="b/gw2"), 1.0)
    assert workers.heartbeats(state(*more, gateway_id="b/gw2"), 1.0) == []
    assert workers.learn(told(*more, gateway_id="c/gw"), 1.0)
    assert workers.learn(told(*more), 1.0), "of the first gateway, fewer"
    assert workers.learn(told(*many(MAX_SITE_MODELS - 5), gateway_id="b/gw2"), 1.0)
    assert workers.learn(told(*more, gateway_id="b/gw3"), GONE_S + 1.5)


def test_a_site_has_no_more_gateways_than_its_share() -> None:
    """Also of those that serve nothing: each is remembered."""
    workers, now = SiteWorkers(), 0.0
    for number in range(3 * MAX_SITE_MODELS):
        assert workers.learn(told(gateway_id=f"b/gw{number}"), now)
        now += 2 * GONE_S / MAX_SITE_MODELS
    assert len(workers._sites["b"].gateways) <= MAX_SITE_MODELS
    one, *others = SiteWorkers(), *many(MAX_SITE_MODELS)
    assert one.learn(told(*others), 0.0) and not one.learn(told(gateway_id="b/gw2"), 1.0)


def test_a_site_whose_models_change_all_the_time_is_heard_in_part() -> None:
    """What changes is costly for gateways and schedulers; what stays is heard all the while."""
    (found,) = site(heartbeat("d1"))
    workers, num = SiteWorkers(), MAX_SITE_MODELS - 1

    def ready(number: int, now: float) -> list[str]:
        models = [found, *many(num, f"r{number}")]
        assert workers.learn(told(*models), now)
        beats = workers.heartbeats(state(*models, number=number), now)
        return [each.model.name for each in beats if each.state == "ready" and each.model]

    assert len(ready(1, 0.0)) == MAX_SITE_MODELS
    assert ready(2, 0.0) == [CARD.name]
    assert len(ready(3, CHANGES_S / 2)) == 1 + MAX_SITE_MODELS // 2


def test_names_of_other_sites_are_printable() -> None:
    fleet = Fleet("own")
    card = model_card(name="\x1b[2Jm\n")
    for each in (heartbeat("b/gw/00ff", model=card), heartbeat("d1")):
        fleet.observe(each, 0.0)
    assert models_of_sites(fleet) == {"b": [r"\x1b[2Jm\n"]}


def test_a_flood_of_states_is_not_even_read() -> None:
    """To decode one may take milliseconds."""
    num_decoded, now = 0, [0.0]
    check = SenderCheck(lambda: now[0])

    def decode(data: bytes) -> SiteState:
        nonlocal num_decoded
        num_decoded += 1
        return state()

    take, large = check.checked(decode, STATE), bytes(2**17)
    for _ in range(4):
        take(large)
    with pytest.raises(Overloaded, match="site b sends more than 512 KiB of states a second"):
        take(large)
    now[0] = 0.25
    take(large)
    assert (num_decoded, check.site_bytes.received["b"]) == (5, 6 * 2**17)
