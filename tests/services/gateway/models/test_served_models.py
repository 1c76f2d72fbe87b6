"""Which model and revision a request gets, from a catalogue in a Redis of the simulation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.gateway.models.live_models import Catalog
from services.gateway.models.loaded_texts import LoadedTexts
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedText
from services.gateway.tenancy.errors import ModelNotAllowed
from services.gateway.text.model_files import ModelFiles
from shared.errors import DependencyUnavailable, InvalidRequest, NoCapacity, UnknownModel
from shared.lifecycle.health import Fleet
from shared.messages import DeviceMemory, Heartbeat, HostedModel, HostLoad, WorkerLoad
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.reader import RegistryReader
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_admin import store_api_key
from tests.services.gateway.peer import CARD
from tests.support.services.model_dir import served_text, without_process
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore

ACME, OTHER = TenantRecord(tenant_id="acme"), TenantRecord(tenant_id="other")


def _read(source: str) -> ServedText:
    return without_process(served_text(ModelFiles(Path(source))))


class Rig:
    def __init__(self, own: ModelFiles | None) -> None:
        self.time, self.number = 0.0, 0
        self.store = MemoryStore()
        self.admin = RegistryAdmin(self.store, lambda: 1.0)
        self.reader = RegistryReader(self.store, self)
        self.fleet = Fleet("gateway-0")
        self.catalog = Catalog(self.fleet, "" if own is None else "tiny", self)
        self.models = ServedModels(
            self.catalog,
            None if own is None else served_text(own),
            self.reader,
            LoadedTexts(_read, self, max_loaded=4),
            SeededRandomness(7),
        )

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def beat(self, process_id: str, **fields: object) -> None:
        self.number += 1
        load = WorkerLoad(step=self.number, step_budget_s=1.0)
        defaults = {"roles": ("decode",), "load": load, "state": "ready"}
        heartbeat = Heartbeat(
            process_id=process_id,
            epoch=1,
            sequence_number=self.number,
            interval_s=0.25,
            **{**defaults, **fields},
        )
        self.fleet.observe(heartbeat, self.time)
        self.catalog.observe(heartbeat)

    def worker(self, name: str, digest: str, context: int = 4096) -> None:
        card = msgspec.structs.replace(CARD, name=name, revision=digest, max_context_tokens=context)
        self.beat(f"w-{name}-{digest}", model=card)

    def host(self, *models: HostedModel, **fields: object) -> None:
        device = DeviceMemory(device="cpu", budget_bytes=1, used_bytes=0)
        load = HostLoad(devices=(device,), models=models)
        self.beat("h", roles=("host",), load=None, host=load, **fields)

    async def draws(self, name: str, count: int) -> Counter[str]:
        return Counter([(await self.models.choose(name)).card.revision for _ in range(count)])


@pytest_asyncio.fixture
async def rig() -> Rig:
    found = Rig(None)
    await store_api_key(found.store, "key", "acme")
    return found


async def add(rig: Rig, path: Path, name: str, *digests: str) -> None:
    """One revision for each digest, r1, r2, …"""
    for number, digest in enumerate(digests, 1):
        await rig.admin.add(name, str(path))
        await rig.admin.record_digest(name, f"r{number}", digest)
        rig.worker(name, digest)
    await rig.reader.refresh()


async def test_canary_gets_its_share_and_a_promotion_all(rig: Rig, model_dir: Path) -> None:
    await add(rig, model_dir, "m", "old", "new")
    assert await rig.draws("m", 50) == {"old": 50}
    await rig.admin.set_share("m", "r2", 5)
    await rig.reader.refresh()
    found = await rig.draws("m", 2000)
    assert set(found) == {"old", "new"}
    assert 60 <= found["new"] <= 140  # 100 expected, with a deviation of 9.7
    assert (await rig.models.main("m")).card.revision == "old"
    await rig.admin.promote("m", "r2")
    await rig.reader.refresh()
    assert await rig.draws("m", 50) == {"new": 50}


async def test_canary_that_nothing_serves_or_reads_fails_no_request(
    rig: Rig, model_dir: Path, tmp_path: Path
) -> None:
    await add(rig, model_dir, "m", "old")
    await rig.admin.add("m", str(tmp_path / "none"), canary=50)
    await rig.admin.record_digest("m", "r2", "new")
    await rig.reader.refresh()
    assert await rig.draws("m", 20) == {"old": 20}  # without a worker
    rig.worker("m", "new")
    assert await rig.draws("m", 20) == {"old": 20}  # with one, but without its files
    await rig.admin.promote("m", "r2")
    await rig.reader.refresh()
    with pytest.raises(NoCapacity, match="its log names them"):
        await rig.models.choose("m")


async def test_model_of_another_tenant_is_unknown(rig: Rig, model_dir: Path) -> None:
    await add(rig, model_dir, "open", "d")
    await add(rig, model_dir, "hidden", "d")
    await rig.admin.set_fields("hidden", {"tenants": ["acme"]})
    await rig.reader.refresh()
    assert [card.name for card in rig.models.cards(ACME)] == ["hidden", "open"]
    assert [card.name for card in rig.models.cards(OTHER)] == ["open"]
    rig.models.check(ACME, "hidden")
    messages = []
    for name in ("hidden", "absent"):
        with pytest.raises(UnknownModel) as raised:
            rig.models.check(OTHER, name)
        messages.append(raised.value.message.replace(name, "?"))
    assert messages[0] == messages[1]
    limited = msgspec.structs.replace(ACME, allowed_models=("open",))
    with pytest.raises(ModelNotAllowed):
        rig.models.check(limited, "hidden")
    assert [card.name for card in rig.models.cards(limited)] == ["open"]


async def test_cards_of_hosts_prepare_requests_of_cold_models(rig: Rig, model_dir: Path) -> None:
    await rig.admin.add("m", str(model_dir))
    await rig.reader.refresh()
    hosted = HostedModel(name="m", revision="r1", state="cold", device="cpu", start_s=9.0)
    with pytest.raises(NoCapacity, match="no host has loaded the model 'm' yet") as raised:
        await rig.models.choose("m")
    assert raised.value.retry_after_s == 5.0
    rig.host(hosted)
    with pytest.raises(NoCapacity) as raised:
        await rig.models.choose("m")
    assert raised.value.retry_after_s == 9.0
    assert rig.models.cards(ACME) == []
    await rig.admin.record_digest("m", "r1", "d")
    await rig.reader.refresh()
    card = msgspec.structs.replace(CARD, name="m", revision="d", max_context_tokens=64)
    rig.host(msgspec.structs.replace(hosted, card=card))
    assert (await rig.models.choose("m")).card == card
    rig.worker("m", "d", context=128)  # what serves goes before what may
    assert (await rig.models.choose("m")).card.max_context_tokens == 128
    rig.catalog.lost("w-m-d")
    rig.time = 100.0
    assert (await rig.models.choose("m")).card == card
    rig.host(msgspec.structs.replace(hosted, card=card, state="failed"))
    with pytest.raises(NoCapacity, match="no worker and no host has the model 'm' now"):
        await rig.models.choose("m")
    rig.host(msgspec.structs.replace(hosted, card=card), state="draining")
    with pytest.raises(NoCapacity):
        await rig.models.choose("m")


async def test_context_of_the_registry_limits(rig: Rig, model_dir: Path) -> None:
    await add(rig, model_dir, "m", "d")
    for limit, expected in ((100, 100), (8192, 4096)):
        await rig.admin.set_fields("m", {"max_context_tokens": limit})
        await rig.reader.refresh()
        assert (await rig.models.choose("m")).card.max_context_tokens == expected
        assert rig.models.card("m").max_context_tokens == expected


async def test_names_before_the_registry_is_read_and_no_name(rig: Rig) -> None:
    with pytest.raises(DependencyUnavailable):
        rig.models.check(ACME, "m")
    await rig.reader.refresh()
    with pytest.raises(UnknownModel):
        rig.models.check(ACME, "m")
    with pytest.raises(InvalidRequest, match="names no model") as raised:
        rig.models.check(ACME, "")
    assert raised.value.param == "model"


async def test_own_model_goes_before_one_of_the_registry(
    model_dir: Path, model_files: ModelFiles
) -> None:
    rig = Rig(model_files)
    await store_api_key(rig.store, "key", "acme")
    await add(rig, model_dir, "tiny", "d")
    await rig.admin.set_fields("tiny", {"tenants": ["acme"], "max_context_tokens": 64})
    await add(rig, model_dir, "m", "d")
    for tenant in (ACME, OTHER):
        rig.models.check(tenant, "tiny")
        assert [card.name for card in rig.models.cards(tenant)] == ["tiny", "m"]
    served = await rig.models.choose("tiny")
    assert served.text.files.tokens is model_files.tokens
    assert served.card.max_context_tokens == 4096
