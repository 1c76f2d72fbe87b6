"""A site that reports free blocks without end, and serves nothing."""

from __future__ import annotations

import asyncio

from shared.errors import WorkerBusy
from shared.lifecycle.health import SITE_INTERVAL_S
from shared.messages import (
    Alive,
    DecodeStarted,
    ModelCard,
    ReadSiteModels,
    ReportAlive,
    SiteCounters,
    SiteLoad,
    SiteModel,
    SiteModels,
    SiteState,
    StartDecode,
)
from shared.sites.site_states import models_id
from shared.subjects import from_sites, state_to_sites
from tests.simulation.sites.plan import LIAR, Lie
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.process import SimulatedProcess

GATEWAY = "gateway-0"
FREE = SiteLoad(num_free_blocks=10**6, num_total_blocks=10**6, num_engines=1000)


class LyingSite:
    def __init__(self, network: SimulatedNetwork, card: ModelCard, region: str, lie: Lie) -> None:
        self._process = SimulatedProcess(GATEWAY)
        self._bus = network.bus(GATEWAY, self._process)
        self._models, self._region, self._lie = (SiteModel(card),), region, lie
        self._models_id, self._name = models_id(self._models), f"{LIAR}/{GATEWAY}"
        self.num_starts = 0

    async def start(self) -> None:
        serve = self._bus.serve
        await serve(from_sites("gateway", GATEWAY, "models"), ReadSiteModels, self._read_models)
        await serve(from_sites("decode", GATEWAY, "alive"), ReportAlive, self._alive)
        await serve(from_sites("decode", GATEWAY, "start"), StartDecode, self._start_decode)
        self._process.start(self._report())

    async def stop(self) -> None:
        self._process.die()
        await self._bus.close()

    async def _report(self) -> None:
        number = 0
        while True:
            number += 1
            state = SiteState(
                gateway_id=self._name,
                epoch=1,
                sequence_number=number,
                region=self._region,
                models_id=self._models_id,
                loads=(FREE,),
                counters=(SiteCounters(),),
            )
            await self._bus.publish(state_to_sites(GATEWAY), state)
            await asyncio.sleep(SITE_INTERVAL_S)

    def _read_models(self, _: ReadSiteModels) -> SiteModels:
        return SiteModels(gateway_id=self._name, models_id=self._models_id, models=self._models)

    def _alive(self, _: ReportAlive) -> Alive:
        return Alive(epoch=1, host="", uptime_s=1.0)

    async def _start_decode(self, command: StartDecode) -> DecodeStarted:
        self.num_starts += 1
        match self._lie:
            case "refuses":
                raise WorkerBusy("no room")
            case "is_silent":
                await asyncio.Event().wait()
        return DecodeStarted(placement_id=command.placement_id, num_cached_tokens=0)
