"""A public prefix that cannot be read at once is read later, and the others meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.dialects.prefixes.public_prefix_watcher import PublicPrefixWatcher
from shared.block_hash import PUBLIC_TENANT_ID
from shared.clock import MonotonicClock
from shared.errors import DeadlineExceeded, NoCapacity
from shared.store import StoreUnavailable
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from tests.support.world.clock import run
from tests.support.world.store import MemoryStore


class Models:
    """Serves all models. `main` fails with each of `failures` once; so does the reader."""

    names = ("m",)

    def __init__(self, failures: Iterator[Exception]) -> None:
        self._failures = failures

    def serves(self, model: str) -> bool:
        return True

    async def main(self, model: str) -> Any:
        for error in self._failures:
            raise error
        return SimpleNamespace(card=None)

    async def read(self, prefix: PinnedPrefix, card: None) -> PinnedPrefix:
        return msgspec.structs.replace(prefix, token_ids=b"\1\0\0\0")


def prefix_of(name: str, token_ids: bytes = b"") -> PinnedPrefix:
    given = {"name": name, "tenant_id": PUBLIC_TENANT_ID, "model": "m", "created_at": 1}
    return PinnedPrefix(messages=[], token_ids=token_ids, **given)  # type: ignore[arg-type]


def watcher_of(
    public: PublicPrefixes, store: MemoryStore, failures: list[Exception]
) -> PublicPrefixWatcher:
    models = cast(Any, Models(iter(failures)))
    return PublicPrefixWatcher(
        public,
        store,
        MonotonicClock(),
        models=models,
        reader_of=lambda _: models,
        wall_clock=lambda: 1.0,
    )


@pytest.mark.parametrize(
    "error",
    [NoCapacity("none"), DeadlineExceeded("late"), RuntimeError("bug"), StoreUnavailable("away")],
)
def test_failed_prefix_is_read_again_without_a_change(error: Exception) -> None:
    async def play() -> None:
        store, public = MemoryStore(), PublicPrefixes()
        watcher = watcher_of(public, store, [error])
        for each in (prefix_of("new"), prefix_of("read", b"\2\0\0\0")):
            await pinned_prefix.save(store, each, 1.0)
        if isinstance(error, StoreUnavailable):
            with pytest.raises(StoreUnavailable):
                await watcher._poll()
        else:
            await watcher._poll()
            assert [each.name for each in public._prefixes] == ["read"]
        await watcher._poll()
        assert [each.name for each in public._prefixes] == ["new", "read"]

    run(play())


def test_change_while_a_prefix_is_read_is_not_undone() -> None:
    """Neither a deletion nor a new text: the tokens of the old one come too late."""

    async def play(*new: PinnedPrefix) -> None:
        store, public = MemoryStore(), PublicPrefixes()
        await pinned_prefix.save(store, prefix_of("house"), 1.0)

        class ChangedMeanwhile(Models):
            async def read(self, prefix: PinnedPrefix, card: None) -> PinnedPrefix:
                await pinned_prefix.delete(store, PUBLIC_TENANT_ID, "house")
                for each in new:
                    await pinned_prefix.save(store, each, 1.0)
                return await super().read(prefix, card)

        watcher = watcher_of(public, store, [])
        models = cast(Any, ChangedMeanwhile(iter(())))
        watcher._reader_of = lambda _: models
        await watcher._poll()
        saved = await pinned_prefix.load(store, PUBLIC_TENANT_ID, "house")
        assert saved == (new[0] if new else None)
        await watcher._poll()
        assert public._prefixes == new

    run(play())
    run(play(prefix_of("house", b"\2\0\0\0")))


def test_unexpected_error_is_logged_once_for_each_version() -> None:
    async def play() -> None:
        store = MemoryStore()
        watcher = watcher_of(PublicPrefixes(), store, [RuntimeError("bug")] * 9)
        with capture_logs() as logs:
            for created_at in (1, 1, 2):
                changed = msgspec.structs.replace(prefix_of("new"), created_at=created_at)
                await pinned_prefix.save(store, changed, 1.0)
                await watcher._poll()
                await watcher._poll()
        assert [each["log_level"] for each in logs] == ["error"] * 2

    run(play())
