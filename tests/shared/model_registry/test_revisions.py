"""How a name moves between revisions."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from shared.errors import ConfigError
from shared.model_registry.record import MAX_REVISIONS, RegisteredModel, RegisteredRevision
from shared.model_registry.revisions import (
    choose_revision,
    next_revision_name,
    promoted,
    share_of,
    with_digest,
    with_revision,
    with_share,
    without_revision,
)


def revision(name: str, weight: float = 0.0, digest: str = "d") -> RegisteredRevision:
    return RegisteredRevision(name=name, source=f"/{name}", digest=digest, weight=weight)


def model(*revisions: RegisteredRevision) -> RegisteredModel:
    return RegisteredModel(name="m", revisions=revisions)


def weights(found: RegisteredModel) -> dict[str, float]:
    return {each.name: each.weight for each in found.revisions}


def shares(found: RegisteredModel) -> dict[str, float]:
    return {each.name: pytest.approx(share_of(found, each)) for each in found.revisions}


def chosen(found: RegisteredModel, draw: float) -> str | None:
    revision = choose_revision(found, draw)
    return None if revision is None else revision.name


def test_requests_are_shared_by_weight() -> None:
    found = model(revision("r1", 95), revision("r2", 5), revision("r3", 0))
    counts = Counter(chosen(found, (i + 0.5) / 1000) for i in range(1000))
    assert counts == {"r1": 950, "r2": 50}
    assert chosen(found, 0.0) == "r1" and chosen(found, 1 - 2**-53) == "r2"


def test_revision_without_a_digest_is_not_chosen() -> None:
    found = model(revision("r1", 1), revision("r2", 99, digest=""))
    assert {chosen(found, draw) for draw in (0.0, 0.5, 0.999)} == {"r1"}
    assert choose_revision(model(revision("r1", 1, digest=""), revision("r2", 0)), 0.5) is None


def test_further_revision_is_staged_and_named_after_the_last() -> None:
    found = model(revision("r2", 1), revision("other"), revision("rx"))
    assert next_revision_name(found) == "r3"
    assert next_revision_name(model(revision("other", 1))) == "r1"
    assert weights(with_revision(model(revision("r1", 1)), revision("r2", 7))) == {"r1": 1, "r2": 0}


def test_canary_takes_its_share_from_the_others_in_proportion() -> None:
    found = with_share(model(revision("r1", 1), revision("r2")), "r2", 5)
    assert shares(found) == {"r1": 0.95, "r2": 0.05}
    found = with_share(with_revision(found, revision("r3")), "r3", 50)
    assert shares(found) == {"r1": 0.475, "r2": 0.025, "r3": 0.5}
    assert shares(with_share(found, "r2", 20))["r2"] == 0.2


def test_promotion_moves_all_requests_and_removes_what_it_replaces() -> None:
    found = model(revision("r1"), revision("r2", 90), revision("r3", 10), revision("r4"))
    assert weights(promoted(found, "r3", keep=False)) == {"r3": 1, "r4": 0}
    kept = promoted(found, "r3", keep=True)
    assert weights(kept) == {"r1": 0, "r2": 0, "r3": 1, "r4": 0}
    assert weights(promoted(kept, "r2", keep=False)) == {"r2": 1, "r4": 0}  # undone


def test_promotion_waits_until_the_revision_is_loaded() -> None:
    before = model(revision("r1", 1), revision("r2", digest=""), revision("r3"))
    pending = promoted(before, "r2", keep=False)
    assert chosen(pending, 0.99) == "r1" and weights(pending) == weights(before)
    assert weights(with_digest(pending, "r2", "d2")) == {"r2": 1, "r3": 0}
    kept = with_digest(promoted(before, "r2", keep=True), "r2", "d2")
    assert weights(kept) == {"r1": 0, "r2": 1, "r3": 0}
    assert not any(each.promotion for each in kept.revisions)


def test_later_promotion_replaces_a_pending_one() -> None:
    before = model(revision("r1", 1), revision("r2", digest=""), revision("r3", digest=""))
    found = promoted(promoted(before, "r2", keep=False), "r3", keep=False)
    loaded = with_digest(found, "r2", "d2")
    assert weights(loaded) == weights(before) and chosen(loaded, 0.5) == "r1"
    cancelled = promoted(promoted(before, "r2", keep=False), "r1", keep=True)
    assert with_digest(cancelled, "r2", "d2").revisions[1].weight == 0


def test_promotion_is_immediate_while_nothing_serves() -> None:
    before = model(revision("r1", 1, digest=""), revision("r2", digest=""))
    assert weights(promoted(before, "r2", keep=False)) == {"r2": 1}


def test_digest_is_recorded_once() -> None:
    found = with_digest(model(revision("r1", 1, digest="")), "r1", "first")
    assert with_digest(found, "r1", "second").revisions[0].digest == "first"


def test_removal_leaves_a_revision_that_serves() -> None:
    found = model(revision("r1", 60), revision("r2", 30), revision("r3", 10))
    assert shares(without_revision(found, "r1")) == {"r2": 0.75, "r3": 0.25}
    pending = promoted(model(revision("r1", 1), revision("r2", digest="")), "r2", keep=False)
    assert weights(without_revision(pending, "r1")) == {"r2": 1}


@pytest.mark.parametrize("percent", [0, 100, -5, 250, float("nan")])
def test_canary_of_nothing_or_all_is_refused(percent: float) -> None:
    with pytest.raises(ConfigError, match="is not between 0 and 100"):
        with_share(model(revision("r1", 1), revision("r2")), "r2", percent)


def test_impossible_changes_are_refused_with_names() -> None:
    pair = model(revision("r1", 1), revision("r2"))
    with pytest.raises(ConfigError, match="'m' has no revision 'r9': it has r1, r2"):
        promoted(pair, "r9", keep=False)
    with pytest.raises(ConfigError, match="no other revision of 'm' has a weight to take 80 %"):
        with_share(pair, "r1", 20)
    with pytest.raises(ConfigError, match="without 'r1': promote 'r2' first"):
        without_revision(pair, "r1")
    with pytest.raises(ConfigError, match="'r1' is the only revision of 'm'"):
        without_revision(model(revision("r1", 1)), "r1")
    with pytest.raises(ConfigError, match="has a revision 'r2' already"):
        with_revision(pair, revision("r2"))
    full = model(*(revision(f"r{i}", 1) for i in range(MAX_REVISIONS)))
    with pytest.raises(ConfigError, match=f"has {MAX_REVISIONS} revisions"):
        with_revision(full, revision("new"))
    pending = promoted(model(revision("r1", 1), revision("r2", digest="")), "r2", keep=False)
    with pytest.raises(ConfigError, match="'r2' of 'm' is being promoted"):
        with_share(pending, "r1", 20)


def test_a_name_that_serves_never_stops_serving() -> None:
    draw = random.Random(7)
    found, num_changes = model(revision("r1", 1)), 0
    for _ in range(2000):
        try:
            found = changed(found, draw)
        except ConfigError:
            found = without_others(found)
            continue
        num_changes += 1
        assert choose_revision(found, draw.random()) is not None, found
        assert sum(bool(each.promotion) for each in found.revisions) <= 1
        msgspec.json.decode(msgspec.json.encode(found), type=RegisteredModel)
    assert num_changes > 1000


def changed(found: RegisteredModel, draw: random.Random) -> RegisteredModel:
    """One random change; raises ConfigError if it is refused."""
    name = draw.choice([each.name for each in found.revisions])
    match draw.randrange(4):
        case 0:
            return with_revision(found, revision(next_revision_name(found), digest=""))
        case 1:
            return with_share(found, name, draw.uniform(1, 99))
        case 2:
            return promoted(found, name, keep=draw.random() < 0.5)
        case _:
            return with_digest(found, name, f"digest of {name}")


def without_others(found: RegisteredModel) -> RegisteredModel:
    """Makes room: promotes the revision that serves most."""
    loaded = [each for each in found.revisions if each.digest and each.weight > 0]
    best = max(loaded, key=lambda each: each.weight)
    return promoted(found, best.name, keep=False)
