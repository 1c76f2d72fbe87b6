"""No sequence of operations leaks data between tenants, or between salts, in any tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.request import generation_request as target
from services.kv_index import registry
from services.kv_index.service import KvIndexService
from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.prefix_match import CachedPrefix
from shared.engine.kv.kv_writer import KvWriter
from shared.messages import MatchPrefix
from tests.simulation.world.isolation import Isolation, drop_events, isolation
from tests.support.world.clock import run
from tests.support.world.workers import BLOCK_SIZE

# Names that could collide, in a hash or in a Redis key.
TENANTS = ("a", "a:prefix", "*")
SALTS = ("", "a")
STEM = list(range(100, 100 + 6 * BLOCK_SIZE))
PROMPTS = (STEM, STEM[: 3 * BLOCK_SIZE + 5], [*STEM[: 2 * BLOCK_SIZE], *range(500, 560)])
DECODERS = ("decode-1", "worker-1")
CANDIDATES = ((), ("prefill-1",), ("worker-1", "prefill-1"), ("nobody",))

Operation = tuple[Any, ...]

TENANT, SALT, PROMPT = st.sampled_from(TENANTS), st.sampled_from(SALTS), st.sampled_from(PROMPTS)
PLACE_REQUEST = st.tuples(
    st.just("ask"),
    TENANT,
    SALT,
    PROMPT,
    st.sampled_from(DECODERS),
    st.sampled_from(CANDIDATES),
    st.fixed_dictionaries(
        {
            "max_tokens": st.sampled_from([1, 20]),
            "num_choices": st.sampled_from([1, 1, 2]),
            "kv_quota_tokens": st.sampled_from([0, 0, 3 * BLOCK_SIZE]),
        }
    ),
)
OPERATIONS = st.lists(
    st.one_of(
        PLACE_REQUEST,
        PLACE_REQUEST,
        st.tuples(st.just("match"), TENANT, SALT, PROMPT),
        st.tuples(st.just("stranger"), PROMPT, st.sampled_from(DECODERS)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.004, 0.05, 1.0])),
        st.tuples(st.just("lose events"), st.booleans()),
        st.tuples(st.just("finish"), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=25,
)


async def play(it: Isolation, operations: list[Operation]) -> None:
    num_new_tenants = 0
    for operation in operations:
        match operation:
            case ("ask", tenant_id, salt, tokens, worker_id, candidates, options):
                others = tuple(each for each in candidates if each != worker_id)
                request, number = it.request(tenant_id, salt, tokens, **options)
                await it.place(worker_id, request, number, others)
            case ("match", tenant_id, salt, tokens):
                await it.match(tenant_id, salt, tokens)
            case ("stranger", tokens, worker_id):
                num_new_tenants += 1
                await check_new_tenant(it, f"stranger-{num_new_tenants}", tokens, worker_id)
            case ("abort", index) if it.open:
                await it.abort(index % len(it.open))
            case ("wait", delay_s):
                await asyncio.sleep(delay_s)
            case ("lose events", is_lost):
                it.network.is_dropped = drop_events if is_lost else None
            case ("finish", index) if it.open:
                _, placement_id, request, _ = it.open[index % len(it.open)]
                await it.finish(placement_id, request)
    await it.settle()
    for tenant_id in TENANTS:
        for salt in SALTS:
            for tokens in PROMPTS:
                await it.match(tenant_id, salt, tokens)


async def check_new_tenant(
    it: Isolation, tenant_id: str, tokens: list[int], worker_id: str
) -> None:
    """Checks that a new tenant has no cached prefix, even if others sent the same prompt."""
    if await it.match(tenant_id, "", tokens):
        it.origins.record("index: a stranger has a match")
    request, number = it.request(tenant_id, "", tokens, max_tokens=1)
    placement_id = await it.place(worker_id, request, number, ("prefill-1",))
    if placement_id is not None:
        (received,) = await it.finish(placement_id, request)
        assert received.finish is not None
        if received.finish.served.num_cached_tokens:
            it.origins.record("usage: a stranger has cached tokens")


def found(operations: list[Operation]) -> tuple[list[str], int]:
    """The detected leaks, and the number of checks."""

    async def main() -> tuple[list[str], int]:
        async with isolation() as it:
            await play(it, operations)
            return it.origins.found, it.origins.num_checked

    return run(main())


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_nothing_leaks_between_tenants(operations: list[Operation]) -> None:
    assert found(operations)[0] == []


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(OPERATIONS)
def test_nothing_leaks_in_many_sequences(operations: list[Operation]) -> None:
    assert found(operations)[0] == []


def request_operation(
    tenant_id: str, salt: str, tokens: list[int], worker_id: str, *candidates: str
) -> Any:
    options = {"max_tokens": 1, "num_choices": 1, "kv_quota_tokens": 0}
    return ("ask", tenant_id, salt, tokens, worker_id, candidates, options)


# Every tier is used, by several tenants and salts with one prompt: own hits, pushes, evictions,
# new tenants, a resync.
TOUR: list[Operation] = [
    request_operation("a", "", STEM, "decode-1", "prefill-1"),
    ("wait", 1.0),
    request_operation("*", "", STEM, "decode-1", "prefill-1"),
    request_operation("a", "a", STEM, "worker-1"),
    request_operation("*", "", STEM, "worker-1"),
    ("wait", 1.0),
    request_operation("a", "", STEM, "worker-1", "prefill-1"),
    ("wait", 1.0),
    ("match", "a", "", STEM),
    ("match", "*", "", STEM),
    ("lose events", True),
    request_operation("a:prefix", "", STEM, "worker-1"),
    ("wait", 1.0),
    ("lose events", False),
    ("stranger", STEM, "decode-1"),
    ("stranger", STEM, "worker-1"),
    request_operation("a", "", PROMPTS[2], "decode-1"),
    request_operation("a", "", STEM, "decode-1"),
    ("wait", 1.0),
]


def test_tour_of_all_tiers_finds_no_leak() -> None:
    violations, num_checked = found(TOUR)
    assert violations == []
    assert num_checked > 1000


Plant = Callable[[pytest.MonkeyPatch], None]


def _roots_without_tenant(patch: pytest.MonkeyPatch) -> None:
    right = target.root_hash
    patch.setattr(target, "root_hash", lambda tenant, digest, **more: right("", digest, **more))


def _roots_without_salt(patch: pytest.MonkeyPatch) -> None:
    right = target.root_hash
    patch.setattr(target, "root_hash", lambda tenant, digest, **more: right(tenant, digest))


def _any_block_matches(patch: pytest.MonkeyPatch) -> None:
    """A pool that matches by position in the prompt, ignoring the owner of the tokens."""

    def match(self: BlockPool, block_hashes: Any) -> CachedPrefix:
        at = {block.block_index: block.block_hash for block in self.cached_blocks()}
        wanted = (at.get(index) for index, _ in enumerate(block_hashes))
        found = [self._block_ids[0][each] for each in iter(lambda: next(wanted, None), None)]
        return CachedPrefix(len(found), (0,), (found,))

    patch.setattr(BlockPool, "match", match)


def _first_payload_repeated(patch: pytest.MonkeyPatch) -> None:
    """A sink that repeats the first payload, like a staging slot that is reused too early."""
    right, first = KvWriter.frame, {}

    async def frame(self: KvWriter, header: Any, payload: memoryview) -> None:
        repeated = first.setdefault(len(payload), bytes(payload))
        await right(self, header, memoryview(repeated))

    patch.setattr(KvWriter, "frame", frame)


def _index_matches_first_request(patch: pytest.MonkeyPatch) -> None:
    right, first = KvIndexService._match, []

    def match(self: KvIndexService, message: MatchPrefix) -> Any:
        first.append(message)
        return right(self, first[0])

    patch.setattr(KvIndexService, "_match", match)


def _keys_without_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry, "prefix_records_of", lambda tenant_id: "hearth:a:prefixes")


def _keys_with_unquoted_tenants(patch: pytest.MonkeyPatch) -> None:
    right = registry.record_key

    def unquoted(tenant_id: str, block_hash: bytes) -> str:
        return right("a", block_hash).replace("a", tenant_id, 2)

    patch.setattr(registry, "record_key", unquoted)


@pytest.mark.parametrize(
    ("plant", "part_of_message"),
    [
        (_roots_without_tenant, "reads"),
        (_roots_without_tenant, "index"),
        (_roots_without_tenant, "events"),
        (_roots_without_tenant, "usage"),
        (_roots_without_salt, "two salts"),
        (_any_block_matches, "reads"),
        (_first_payload_repeated, "is sent"),
        (_index_matches_first_request, "index"),
        (_keys_without_tenant, "registry"),
        (_keys_with_unquoted_tenants, "registry"),
    ],
)
def test_planted_leak_is_detected(
    plant: Plant, part_of_message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    violations, _ = found(TOUR)
    assert any(part_of_message in each for each in violations), violations
