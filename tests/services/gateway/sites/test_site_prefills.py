"""A gateway between a decode worker of another site and a prefill worker of its own."""

from __future__ import annotations

import msgspec
import pytest
import structlog

from services.gateway.sites.site_prefills import MAX_RELAYS, SitePrefills
from services.gateway.sites.site_requests import MAX_TOKENS_PER_S, PromptAllowances
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, NoResponders, OutsideRegions, WorkerBusy
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    AbortRequest,
    Done,
    Message,
    PrefillAccepted,
    PrefillFailed,
    PrefillPhases,
    RenewLease,
    ResidencyRefusals,
    RunPrefill,
)
from shared.subjects import control, run_prefill
from shared.transport.outbox import Outbox
from shared.transport.sender_check import SenderCheck
from tests.services.gateway.sites.test_prefill_requests import prefill_worker
from tests.support.records import model_card
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.randomness import SeededRandomness
from tests.support.world.site_prefills import run_prefill_of_site

FROM_A = "hearth.v1.linked.a.prefill.gw.-"
TO_A = "hearth.v1.site.a.decode.decode-1.-.control"
AT_A = "hearth.v1.linked.b.decode.decode-1.-.control.gw.-"
PLACEMENT = b"p" * 16
CONFIG = GatewayConfig(
    nats_url="nats://gw@h:1",
    redis_url="redis://h:1/0",
    process_id="gw",
    site="b",
    kv_networks=("10.2.0.0/16",),
)


class Rig:
    """Site b with the worker p1, and the decode worker decode-1 of site a."""

    def __init__(self, config: GatewayConfig = CONFIG, region: str = "") -> None:
        network, self.clock = SimulatedNetwork(), VirtualClock()
        self.gateway, self.worker, self.other = map(network.bus, ("gw", "p1", "p2"))
        self.decode = network.bus("decode-1")
        self.monitor = HealthMonitor(
            self.gateway, self.clock, SeededRandomness(0), roles=("gateway",), region=region
        )
        self.monitor.state = "ready"
        self.monitor.observe(prefill_worker("p1"))
        self.outbox = Outbox(self.gateway)
        self.regions: dict[str, str] = {}  # of the sites that have been heard
        self.prefills = SitePrefills(
            *(config, self.gateway, self.clock, self.monitor, self.outbox, PromptAllowances()),
            region_of=self.regions.get,
        )
        self.at_worker: list[Message] = []
        self.at_decode: list[Message] = []
        self.refusal: Exception | None = None
        network.taps.append(self._cross)

    def _cross(self, sender: str, subject: str, data: bytes) -> None:
        """Does what the link does with what is sent to decode-1."""
        if subject == TO_A:
            decode = msgspec.msgpack.Decoder(PrefillFailed | PrefillPhases).decode
            self.at_decode.append(SenderCheck().checked(decode, AT_A)(data))

    async def start(self) -> None:
        self.outbox.start()
        await self.prefills.start()
        await self.worker.serve(run_prefill("p1"), RunPrefill, self._run)
        messages = AbortRequest | RenewLease
        await self.worker.subscribe(control("prefill", "p1"), messages, self.at_worker.append)

    def _run(self, command: RunPrefill) -> PrefillAccepted:
        self.at_worker.append(command)
        if self.refusal is not None:
            raise self.refusal
        return PrefillAccepted(placement_id=command.placement_id)

    async def ask(self, message: Message, site: str = "a") -> Message:
        replies = PrefillAccepted if isinstance(message, RunPrefill) else Done
        subject = f"{FROM_A}.run".replace(".a.", f".{site}.")
        return await self.decode.request(subject, message, replies, timeout_s=5)

    async def settle(self) -> None:
        await self.clock.sleep(0.1)


def renewal(site: str = "a", placement_id: bytes = PLACEMENT) -> RenewLease:
    name = f"{site}/decode-1"
    return RenewLease(decode_worker_id=name, placement_ids=(placement_id,), lease_s=3.0)


def test_prefill_is_relayed_and_so_is_its_end() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        for _ in range(2):
            await rig.ask(run_prefill_of_site("a"))
        (command,) = rig.at_worker
        assert isinstance(command, RunPrefill)
        assert (command.decode_worker_id, command.tenant_id) == ("gw", "a/t")
        of_another = PrefillPhases(placement_id=PLACEMENT, prefill_worker_id="p2")
        await rig.other.publish(control("decode", "gw"), of_another)
        phases = PrefillPhases(placement_id=PLACEMENT, prefill_worker_id="p1", link_s=2.0)
        await rig.worker.publish(control("decode", "gw"), phases)
        await rig.settle()
        (told,) = rig.at_decode
        assert isinstance(told, PrefillPhases) and told.link_s == 2.0
        assert told.prefill_worker_id.startswith("b/gw/")

    run(main())


def test_lease_is_renewed_by_its_owner_alone_and_ends_without() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        await rig.ask(run_prefill_of_site("a"))
        await rig.ask(renewal())
        await rig.settle()
        assert rig.at_worker[1:] == [msgspec.structs.replace(renewal(), decode_worker_id="gw")]
        await rig.ask(renewal("c"), "c")
        await rig.ask(renewal(placement_id=b"q" * 16))
        await rig.settle()
        (failed,) = rig.at_decode
        assert isinstance(failed, PrefillFailed) and failed.placement_id == b"q" * 16
        rig.prefills.expire(rig.clock.now() + 2.5)
        await rig.settle()
        assert len(rig.at_worker) == 2
        rig.prefills.expire(rig.clock.now() + 3.5)
        await rig.settle()
        assert isinstance(rig.at_worker[-1], AbortRequest)

    run(main())


def test_loss_of_the_worker_is_told_at_once() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        await rig.ask(run_prefill_of_site("a"))
        rig.monitor.observe(prefill_worker("p1", sequence_number=2, state="stopped"))
        await rig.settle()
        (failed,) = rig.at_decode
        assert isinstance(failed, PrefillFailed)
        assert failed.failure.message == "the prefill worker p1 is lost"

    run(main())


def test_what_is_refused_leaves_nothing_behind() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        outside = run_prefill_of_site("a", targets=())
        with pytest.raises(InvalidRequest):
            await rig.ask(outside)
        assert rig.at_worker == []
        rig.refusal = WorkerBusy("p1 is draining")
        with pytest.raises(WorkerBusy, match="p1 is draining"):
            await rig.ask(run_prefill_of_site("a"))
        rig.refusal = None
        await rig.ask(run_prefill_of_site("a"))
        assert sum(isinstance(each, RunPrefill) for each in rig.at_worker) == 2
        await rig.decode.publish(
            f"{FROM_A}.control", AbortRequest(placement_id=PLACEMENT, reason="superseded")
        )
        await rig.settle()
        assert isinstance(rig.at_worker[-1], AbortRequest)
        rig.monitor.state = "draining"
        with pytest.raises(WorkerBusy):
            await rig.ask(run_prefill_of_site("a", placement_id=b"z" * 16))

    run(main())


def test_prompt_of_some_regions_stays_in_them() -> None:
    """A refusal is counted under the tenant's name here, and none before the site is heard."""

    async def main() -> None:
        rig = Rig(region="fr")
        await rig.start()
        bound = run_prefill_of_site("a", allowed_regions=("de", "fr"))
        with pytest.raises(WorkerBusy, match="no state of the other site has come yet"):
            await rig.ask(bound)
        assert rig.monitor.refusals.last() == ()
        rig.regions["a"] = "us"
        with pytest.raises(OutsideRegions):
            await rig.ask(bound)
        assert rig.monitor.refusals.last() == (ResidencyRefusals("site", "a/t", "us", 1),)
        rig.regions["a"] = "de"
        with pytest.raises(WorkerBusy, match="no prefill worker of this site fits"):
            await rig.ask(bound)
        rig.monitor.observe(prefill_worker("p1", sequence_number=2, region="fr"))
        await rig.ask(bound)
        assert len(rig.at_worker) == 1

    run(main())


def test_site_may_send_so_many_tokens_a_second() -> None:
    """Each costs time of this process, also of a prefill that is aborted at once."""

    async def main() -> None:
        rig = Rig()
        await rig.start()
        num_tokens = MAX_TOKENS_PER_S // 2
        rig.monitor.observe(
            prefill_worker("p1", sequence_number=2, model=model_card(max_context_tokens=10**6))
        )
        for number in range(2):
            await rig.ask(run_prefill_of_site("a", num_tokens, placement_id=bytes([number]) * 16))
        with structlog.testing.capture_logs() as logs:
            for number in range(2, 5):
                with pytest.raises(WorkerBusy, match="site a sends more than 1000000 tokens"):
                    command = run_prefill_of_site("a", 10_000, placement_id=bytes([number]) * 16)
                    await rig.ask(command)
        assert [each["event"] for each in logs] == ["site_prefill_rejected"]
        await rig.ask(run_prefill_of_site("c", placement_id=b"c" * 16), "c")
        await rig.clock.sleep(1.0)
        await rig.ask(run_prefill_of_site("a", num_tokens, placement_id=b"n" * 16))

    run(main())


def test_prefills_of_one_site_leave_room_for_another() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()

        async def fill(site: str) -> int:
            for number in range(MAX_RELAYS):
                placement_id = f"{site} {number:014}".encode()
                try:
                    await rig.ask(run_prefill_of_site(site, placement_id=placement_id), site)
                except WorkerBusy:
                    return number
            return MAX_RELAYS

        assert [await fill("a"), await fill("c")] == [52, 10]

    run(main())


def test_site_without_networks_computes_for_none() -> None:
    async def main() -> None:
        rig = Rig(msgspec.structs.replace(CONFIG, kv_networks=()))
        await rig.start()
        assert not rig.prefills.are_offered
        with pytest.raises(NoResponders):
            await rig.ask(run_prefill_of_site("a"))

    run(main())
