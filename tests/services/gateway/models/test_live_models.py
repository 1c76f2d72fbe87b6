"""The model card of a gateway, from the heartbeats of an uneven fleet."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.gateway.models.card_selection import HOLD_S
from services.gateway.models.live_models import Catalog
from shared.errors import NoCapacity, UnknownModel
from shared.lifecycle.health import Fleet
from shared.messages import Heartbeat, ProcessState, Role, WorkerLoad
from shared.numerics import Numerics
from tests.support.records import model_card

CARD = model_card(kv_format="bf16/b16", numerics=Numerics("exact", "timing", "bfloat16", "1"))


class Rig:
    """`now`: seconds, of the clock that the catalog reads."""

    def __init__(self) -> None:
        self.time = 0.0
        self.fleet = Fleet("gateway-0")
        self.catalog = Catalog(self.fleet, "m", self)
        self.number = 0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def beat(
        self,
        worker_id: str,
        context: int = 4096,
        *,
        role: Role = "decode",
        state: ProcessState = "ready",
        **card: object,
    ) -> None:
        self.number += 1
        card = {"max_context_tokens": context, **card}
        heartbeat = Heartbeat(
            process_id=worker_id,
            epoch=1,
            sequence_number=self.number,
            roles=(role,),
            state=state,
            interval_s=0.25,
            load=WorkerLoad(step=self.number, step_budget_s=1.0),
            model=msgspec.structs.replace(CARD, **card),
        )
        if self.fleet.observe(heartbeat, self.time):
            self.catalog.lost(worker_id)
        self.catalog.observe(heartbeat)

    def context(self) -> int:
        """Of the card that limits requests, which is the one that is listed."""
        card = self.catalog.card("m")
        assert self.catalog.cards() == [card]
        return card.max_context_tokens

    def revision(self) -> str:
        return self.catalog.card("m").revision


def test_context_is_the_largest_whatever_the_order_of_heartbeats() -> None:
    rig, contexts = Rig(), []
    for _ in range(10):
        for worker_id, context in (("d1", 4096), ("d2", 131_072), ("d3", 128)):
            rig.beat(worker_id, context)
            contexts.append(rig.context())
    assert contexts == [4096] + [131_072] * 29


def test_context_is_held_after_its_last_worker_left() -> None:
    rig = Rig()
    rig.beat("d1", 4096)
    rig.beat("d2", 131_072)
    rig.beat("d3", 131_072)
    rig.catalog.lost("d2")
    rig.time = 100.0
    assert rig.context() == 131_072
    rig.catalog.lost("d3")
    rig.time += HOLD_S - 0.1
    assert rig.context() == 131_072
    rig.time += 0.1
    assert rig.context() == 4096
    rig.catalog.lost("d1")
    rig.time += HOLD_S
    assert rig.catalog.cards() == []
    with pytest.raises(NoCapacity):
        rig.context()


def test_worker_that_returns_ends_the_hold() -> None:
    rig = Rig()
    rig.beat("d1", 131_072)
    rig.beat("d1", 131_072, state="draining")
    rig.time = 30.0
    rig.beat("d1", 4096)
    assert rig.context() == 131_072
    rig.beat("d2", 131_072)
    rig.time = 500.0
    assert rig.context() == 131_072


def test_rollout_changes_the_card_once() -> None:
    """The longer known revision wins a tie; prefill workers do not count."""
    rig, seen = Rig(), []
    for worker_id in ("d1", "d2", "d3", "d4"):
        rig.beat(worker_id)
    for worker_id in ("d1", "d2", "d3", "d4"):
        rig.beat(worker_id, state="draining")
        seen.append(rig.revision())
        rig.beat(worker_id, 2048, revision="r2")
        rig.beat(f"p-{worker_id}", revision="r2", role="prefill")
        seen.append(rig.revision())
    assert seen == ["r1"] * 4 + ["r2"] * 4
    assert rig.context() == 2048  # a revision does not inherit the context of another


def test_card_is_that_of_this_site_while_it_has_a_worker() -> None:
    rig = Rig()
    for gateway in ("b/gw.1/00ff", "b/gw.2/00ff"):
        rig.beat(gateway, 2048, revision="r2")
    rig.beat("d1")
    assert rig.revision() == "r1"
    rig.beat("b/gw.1/0000", 131_072)
    assert rig.context() == 131_072, "longer requests are served there"
    rig.catalog.lost("d1")
    assert rig.revision() == "r2"


def test_card_has_the_block_size_of_most_workers() -> None:
    rig = Rig()
    rig.beat("d1", 131_072, block_size=32)
    rig.beat("d2")
    assert rig.catalog.card("m").block_size == 32
    rig.beat("d3")
    card = rig.catalog.card("m")
    assert (card.block_size, card.max_context_tokens) == (16, 4096)


def test_workers_of_another_block_size_are_logged_once() -> None:
    """Of any role, since KV of another size is not used either; a restart counts again."""
    rig = Rig()
    with capture_logs() as logs:
        for _ in range(2):
            rig.beat("cpu-1")
            rig.beat("cpu-2")
            rig.beat("of-another", revision="r2", block_size=64)
            rig.beat("not-ready", block_size=64, state="starting")
        assert logs == []
        for _ in range(2):
            rig.beat("gpu-1", block_size=64, role="prefill")
            rig.beat("gpu-2", block_size=64)
    (logged,) = logs
    assert (logged["event"], logged["log_level"]) == ("block_sizes_differ", "warning")
    assert (logged["worker"], logged["block_sizes"]) == ("gpu-1", [16, 64])
    for worker in ("cpu-1", "cpu-2"):
        rig.catalog.lost(worker)
    with capture_logs() as logs:
        rig.beat("gpu-3", block_size=64)
        assert logs == []
        rig.beat("cpu-3")
    assert [each["worker"] for each in logs] == ["cpu-3"]


def test_features_do_not_split_a_version() -> None:
    """Two of three workers have one block size, each with other features."""
    rig = Rig()
    rig.beat("d1")
    rig.beat("d2", block_size=32, features=("demo/1",))
    rig.beat("d3", block_size=32)
    assert rig.catalog.card("m").block_size == 32


def test_card_has_the_features_of_any_live_worker_of_its_version() -> None:
    rig = Rig()
    rig.beat("d1", features=("demo/2", "demo/1"))
    rig.beat("d2", 8192)
    rig.beat("d3", features=("demo/2",))
    rig.beat("d4", block_size=32, features=("other/1",))
    card = rig.catalog.card("m")
    assert (card.max_context_tokens, card.features) == (8192, ("demo/1", "demo/2"))
    rig.beat("d1", state="draining")
    assert rig.catalog.card("m").features == ("demo/2",)
    for worker_id in ("d2", "d3", "d4"):
        rig.catalog.lost(worker_id)
    card = rig.catalog.card("m")
    assert (card.max_context_tokens, card.features) == (8192, ())


def test_other_models_and_starting_workers_do_not_count() -> None:
    rig = Rig()
    rig.beat("d1", name="other")
    rig.beat("d2", state="starting")
    assert rig.catalog.cards() == []
    with pytest.raises(UnknownModel):
        rig.catalog.card("other")


WORKERS = st.dictionaries(
    st.sampled_from([f"d{number}" for number in range(7)]),
    st.tuples(st.sampled_from(["r1", "r2", "r3"]), st.sampled_from([128, 4096, 131_072])),
    min_size=1,
)


@given(WORKERS, st.data())
def test_any_order_of_heartbeats_gives_one_card(
    workers: dict[str, tuple[str, int]], data: st.DataObject
) -> None:
    """Each order selects a revision with most workers, and keeps it."""
    rig = Rig()
    for worker_id in data.draw(st.permutations(sorted(workers))):
        rig.beat(worker_id, workers[worker_id][1], revision=workers[worker_id][0])
    num_workers = Counter(revision for revision, _ in workers.values())
    first = rig.catalog.card("m")
    assert num_workers[first.revision] == max(num_workers.values())
    of_revision = [context for revision, context in workers.values() if revision == first.revision]
    assert first.max_context_tokens == max(of_revision)
    for worker_id in data.draw(st.permutations(sorted(workers))):
        rig.beat(worker_id, workers[worker_id][1], revision=workers[worker_id][0])
        assert rig.catalog.card("m") == first


@pytest.mark.parametrize("is_cold_started", [True, False])
def test_model_that_is_cold_started_keeps_its_card_without_a_worker(is_cold_started: bool) -> None:
    rig = Rig()
    rig.catalog = Catalog(rig.fleet, "m", rig, is_cold_started=is_cold_started)

    def reason() -> str | None:
        state = rig.catalog.readiness(is_connected=True, is_draining=False, redis="ok")
        return state.reason

    rig.beat("s1", role="scheduler")
    assert reason() == "no live decode worker"  # and it has never had one
    rig.beat("d1", 4096)
    rig.beat("d1", 4096, state="draining")
    rig.catalog.lost("d1")
    rig.time += 100 * HOLD_S
    rig.beat("s1", role="scheduler")
    if is_cold_started:
        assert rig.context() == 4096
        assert reason() is None
    else:
        assert rig.catalog.cards() == []
        assert reason() == "no live decode worker"
