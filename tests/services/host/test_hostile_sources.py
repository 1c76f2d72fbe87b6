"""Sources that somebody spoiled: a real host answers its probe, and its other models serve on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.services.hostile_checkpoints import Spoil, folders, for_host
from tests.support.services.live_host import LiveHost, Operator, link_model, live_host, operator
from tests.support.services.probes import Probes

NUM_PARTS = 10
NUM_AT_ONCE = 6  # more than a host of two cores has threads for files
MAX_P50_MS = 100.0


async def settled(op: Operator, name: str, source: Path) -> str:
    """Adds a model, and returns what becomes of it."""
    await op.registry.add(name, str(source))
    await op.until(lambda: (found := op.model(name)) is not None and has_settled(found.state))
    found = op.model(name)
    assert found is not None
    outcome = found.failure if found.state == "failed" else found.state
    await op.registry.remove(name)
    await op.until(lambda: op.model(name) is None)
    return outcome


def has_settled(state: str) -> bool:
    return state in ("standby", "failed")


async def all_settled(op: Operator, root: Path, spoils: list[tuple[str, Spoil]]) -> dict[str, str]:
    paths, found = for_host(root, spoils), {}
    for number, path in enumerate(paths):
        found[path.name] = await settled(op, f"{root.name}-{number}", path)
    return found


@pytest.mark.long
@pytest.mark.parametrize("part", range(NUM_PARTS))
async def test_host_serves_beside_all(part: int, tmp_path: Path) -> None:
    link_model(tmp_path / "good-model")
    known = [(name, spoil) for name, spoil in folders()][part::NUM_PARTS]
    lanes = [known[lane::NUM_AT_ONCE] for lane in range(NUM_AT_ONCE)]
    with live_host(tmp_path) as host:
        async with operator(host) as op:
            found = await beside(op, host, tmp_path, lanes)
    for name, outcome in found.items():
        print(f"{name}: {outcome}")
        assert len(outcome.splitlines()) == 1


async def beside(
    op: Operator, host: LiveHost, root: Path, lanes: list[list[tuple[str, Spoil]]]
) -> dict[str, str]:
    await op.registry.add("good", str(root / "good-model"))
    before = await op.state("good", "standby")
    async with Probes({"host": host.health_url}) as probes:
        each = (all_settled(op, lane_root(root, number), lane) for number, lane in enumerate(lanes))
        found = await asyncio.gather(*each)
    after = await op.state("good", "standby")
    times = [probes.p50_ms("host"), probes.p99_ms("host"), probes.max_ms("host")]
    print("/healthz p50, p99, max:", *(f"{each:.1f} ms" for each in times))
    assert probes.num_failed["host"] == 0
    assert probes.p50_ms("host") <= MAX_P50_MS
    assert host.process.poll() is None and after.worker_id == before.worker_id
    return {name: outcome for lane in found for name, outcome in lane.items()}


def lane_root(root: Path, number: int) -> Path:
    path = root / f"lane-{number}"
    path.mkdir()
    return path
