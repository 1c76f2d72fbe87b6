"""Checkpoints that somebody spoiled: the gateway serves on, and its event loop never waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from services.gateway.models.loaded_texts import TextSource
from services.gateway.models.served_text import ServedText
from services.gateway.text.decoding.detokenizer import Detokenizer
from services.host.source_process import SourceFinder
from shared.errors import HearthError, Overloaded
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from tests.services.gateway.models.conftest import Fleet
from tests.support.services.hostile_checkpoints import folders, for_host, spoiled

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "a" * 3000 + " hello"}]
FOUND = {
    "compile_0": "more than 2 s to compile",
    "stripping_joined_decoder": "decoder fails on 0 tokens: index out of",
    "tokenizer.json_fifo": "is not a regular file",
}
ALSO_FOUND = {
    "compile_2": "MemoryError",
    "render_0": "exceeded 2 s",
    "normalizer_regex_0": "the tokenizer",
    "pattern_0": "",
    "panicking_normalizer": "cannot read the tokenizer",
    "generation_config.json_endless": "is not a regular file",
}
NUM_AT_ONCE = 2
NUM_PARTS = 10
MAX_HEALTH_S = 0.1
WATCH_S = 0.05  # between two of them


@dataclass
class Watch:
    """How long `/health` took, and how long the event loop computed meanwhile."""

    fleet: Fleet
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            assert (await self.fleet.http.get("/health")).status_code == 200
            self.seconds.append(time.perf_counter() - began_s)
            self.cpu_seconds.append(time.thread_time() - cpu_s)
            await asyncio.sleep(WATCH_S)


@contextlib.asynccontextmanager
async def watched(fleet: Fleet) -> AsyncIterator[Watch]:
    watch = Watch(fleet)
    running = asyncio.create_task(watch.run())
    try:
        yield watch
        assert not running.done()
    finally:
        running.cancel()


async def tried(fleet: Fleet, path: Path) -> str:
    """Loads the folder's texts and uses them, as a request does. Returns what came of it."""
    while True:
        try:
            text = await fleet.gateway._models.texts.get(TextSource(str(path), path.name))
            await use(fleet, text, path.name)
        except Overloaded:
            continue
        except HearthError as error:
            assert len(error.message) < 1000
            return error.message
        return "served"


async def use(fleet: Fleet, text: ServedText, tenant_id: str) -> None:
    tokens = text.files.tokens
    parser = text.parsing.parser(None, 0, request_id="r", prompt_tail="")
    for _ in range(20):
        parser.feed("a" * 500)
        await asyncio.sleep(0)
    detokenizer = Detokenizer(tokens)
    detokenizer.feed(range(min(tokens.vocab_size, 300)))
    for each in (text.files.end_token_ids, tokens.special_tokens):
        assert len(each) <= 200_000
    await fleet.gateway.preparer.tokenize(text, tenant_id, MESSAGES, ())


async def outcomes(fleet: Fleet, paths: Sequence[Path]) -> dict[str, str]:
    turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(path: Path) -> tuple[str, str]:
        async with turns:
            return path.name, await tried(fleet, path)

    with structlog.testing.capture_logs() as lines:
        found = dict(await asyncio.gather(*map(one, paths)))
    unreadable = [each for each in lines if each["event"] == "model_text_unreadable"]
    reasons = {Path(each["source"]).name: each["reason"] for each in unreadable}
    return found | reasons


@pytest.mark.parametrize(
    "reasons", [FOUND, pytest.param(ALSO_FOUND, marks=pytest.mark.long)], ids=["few", "more"]
)
async def test_gateway_serves_beside_some(
    fleet: Fleet, tmp_path: Path, reasons: dict[str, str]
) -> None:
    known = dict(folders())
    paths = [spoiled(fleet.dirs["en"], tmp_path, name, known[name]) for name in reasons]
    async with watched(fleet) as watch:
        found = await outcomes(fleet, paths)
        assert (await fleet.chat("en")).status_code == 200
    for name, reason in reasons.items():
        assert reason in found[name]
    assert watch.seconds  # each answered: `watched` fails at the first that is not


@pytest.mark.long
@pytest.mark.parametrize("part", range(NUM_PARTS))
async def test_gateway_and_host_survive_all(part: int, fleet: Fleet, tmp_path: Path) -> None:
    assert len(folders()) >= 350
    own = folders()[part::NUM_PARTS]
    paths = [spoiled(fleet.dirs["en"], tmp_path, *each) for each in own]
    async with watched(fleet) as watch:
        found = await outcomes(fleet, paths)
    num_planned = sum([await searched(each) for each in for_host(tmp_path / "host", own)])
    times = sorted(watch.seconds)
    served = [name for name, outcome in found.items() if outcome == "served"]
    print(f"{len(paths)} folders, {len(served)} served, {num_planned} planned; /health ", end="")
    print(f"{len(times)} times: p50 {times[len(times) // 2]:.4f} s, ", end="")
    print(f"p99 {times[len(times) * 99 // 100]:.4f} s, max {times[-1]:.4f} s, ", end="")
    print(f"the loop's CPU at most {max(watch.cpu_seconds):.4f} s")
    for name, outcome in found.items():
        print(f"{name}: {outcome}")
    assert (await fleet.chat("en")).status_code == 200
    assert num_planned > len(own) // 3
    assert times[len(times) // 2] <= MAX_HEALTH_S
    assert max(watch.cpu_seconds) <= MAX_HEALTH_S


async def searched(path: Path) -> bool:
    """As a host looks for the source of a model: whether it finds one."""
    revision = RegisteredRevision(name="r1", source=str(path))
    model = RegisteredModel(name="m", revisions=(revision,))
    with contextlib.suppress(HearthError):
        await SourceFinder("cpu").find(model, revision)
        return True
    return False
