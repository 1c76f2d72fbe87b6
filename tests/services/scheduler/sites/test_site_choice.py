"""Which site gets a request, by what the sites report and what is measured here."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import LocalPrefill, RequestSize, place
from shared.lifecycle.health import Fleet
from shared.messages import SiteCounters, SiteLoad, SiteModel, SiteModels, SiteState
from shared.sites.site_states import models_id
from shared.sites.site_workers import SiteWorkers
from tests.support.grids import in_one_test
from tests.support.records import model_card
from tests.support.world.randomness import SeededRandomness

CARD = model_card(max_context_tokens=100_000)
MODEL = (CARD.name, CARD.revision, CARD.block_size)
PROMPT = RequestSize(2000, 2000)  # 0.2 s, and a tenth for those that decode
MOST = 2**53


@dataclass(frozen=True)
class Site:
    round_trip_s: float
    held_tokens: int = 0
    queued_tokens: int = 0
    token_s: float = 1e-4
    num_waiting: int = 0
    num_free_blocks: int = 10_000


def report(of: Site, second: int) -> tuple[SiteLoad, SiteCounters]:
    """Its counters grow by a thousand prompt tokens a second."""
    load = SiteLoad(
        num_free_blocks=of.num_free_blocks,
        num_total_blocks=10_000,
        prefill_tokens_in_flight=of.queued_tokens,
        num_waiting=of.num_waiting,
    )
    counters = SiteCounters(
        num_computed_prompt_tokens=1000 * second, busy_s=1000 * second * of.token_s
    )
    return load, counters


class Home:
    """A scheduler's view of sites, with their round trips."""

    def __init__(self, round_trips_s: dict[str, float]) -> None:
        self.fleet = Fleet("own")
        self.workers = WorkerFleet(self.fleet, lambda worker_id: round_trips_s[worker_id[0]])
        self.states = SiteWorkers()
        self.ids: dict[str, str] = {}

    def state(self, site: str, of: tuple[SiteLoad, SiteCounters], second: int) -> None:
        gateway, models = f"{site}/gw", (SiteModel(CARD),)
        digest = models_id(models)
        learned = SiteModels(gateway_id=gateway, models_id=digest, models=models)
        self.states.learn(learned, float(second))
        made = SiteState(
            gateway_id=gateway,
            epoch=1,
            sequence_number=second,
            models_id=digest,
            loads=of[:1],
            counters=of[1:],
        )
        for heartbeat in self.states.heartbeats(made, float(second)):
            self.fleet.observe(heartbeat, float(second))
            self.workers.on_heartbeat(heartbeat, float(second))
            self.ids[site] = heartbeat.process_id

    def chosen(self, held_tokens: dict[str, int], now: float) -> str | None:
        elsewhere = self.workers.serving_elsewhere(MODEL)
        assert elsewhere is not None
        target = place(
            PROMPT,
            elsewhere,
            {self.ids[site]: num // CARD.block_size for site, num in held_tokens.items()},
            local_prefill=LocalPrefill(always=4, at_most=1_000_000),
            now=now,
            random_below=SeededRandomness(0).below,
            prefers_holders=False,
        )
        return None if target is None else target.decode_id[0]


def chosen(sites: dict[str, Site]) -> str | None:
    home = Home({name: each.round_trip_s for name, each in sites.items()})
    for second in range(1, 5):
        for name, each in sites.items():
            home.state(name, report(each, second), second)
    return home.chosen({name: each.held_tokens for name, each in sites.items()}, 4.0)


@in_one_test(
    ("name", "b", "c", "d", "expected"),
    [
        ("the nearest", Site(0.02), Site(0.01), Site(0.03), "c"),
        ("the fastest", Site(0.02), Site(0.01), Site(0.03, token_s=5e-5), "d"),
        ("the prefix", Site(0.02), Site(0.01), Site(0.1, held_tokens=1920), "d"),
        ("a short prefix", Site(0.02), Site(0.01), Site(0.1, held_tokens=256), "c"),
        ("more of it", Site(0.02, 512), Site(0.02, 1024), Site(0.02, 1008), "c"),
        ("half of it, nearer", Site(0.02, 960), Site(0.2, 1920), Site(0.3), "b"),
        ("the queue", Site(0.02), Site(0.01, queued_tokens=2000), Site(0.03), "b"),
        (
            "the queue before the prefix",
            Site(0.02, queued_tokens=100),
            Site(0.01, queued_tokens=2000),
            Site(0.2, held_tokens=1920, queued_tokens=4000),
            "b",
        ),
        ("waiting requests", Site(0.02), Site(0.01, num_waiting=3), Site(0.09), "b"),
        ("room", Site(0.2), Site(0.01, 1920, num_free_blocks=9), Site(0.3), "b"),
        ("too much work", *[Site(0.01, queued_tokens=20000)] * 3, None),
    ],
)
def test_least_predicted_time_to_first_token(
    name: str, b: Site, c: Site, d: Site, expected: str | None
) -> None:
    assert chosen({"b": b, "c": c, "d": d}) == expected, name


def test_what_a_site_says_of_itself_is_no_prior_of_another() -> None:
    home = Home({"b": 0.0, "c": 0.01})
    for second in range(1, 50):
        home.state("b", report(Site(0.0, token_s=1e-5), second), second)
    home.state("c", report(Site(0.01), 50), 50)
    assert home.workers.speed(home.ids["b"]).token_s < 2e-5
    assert home.workers.speed(home.ids["c"]).token_s == 1e-4


def test_absurd_loads_bring_a_site_no_nearer_than_it_is() -> None:
    """Zero and the largest numbers in turn, and all of the prompt: the round trip remains."""
    loads = dict.fromkeys(SiteLoad.__struct_fields__, MOST) | {"num_engines": 1}
    counters = dict.fromkeys(SiteCounters.__struct_fields__, MOST) | {"busy_s": 1e12}
    most = SiteLoad(**loads), SiteCounters(**counters)
    least = SiteLoad(num_free_blocks=MOST, num_total_blocks=MOST), SiteCounters()
    home = Home({"b": 0.3, "c": 0.01})
    for second in range(1, 20):
        home.state("b", most if second % 2 else least, second)
        home.state("c", report(Site(0.01), second), second)
        assert home.workers.speed(home.ids["b"]).step_s >= 0.3
        assert home.chosen({"b": 1920}, float(second)) == "c"
