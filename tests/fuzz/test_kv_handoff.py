"""A data plane that spoils frames on their way from prefill to decode.

Whatever becomes of them, the tokens are those of an undisturbed run: what is wrong is counted,
refused and computed again.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import FrameRefused
from shared.kv_wire.frames import fault_of
from shared.kv_wire.link import FrameHeader
from shared.messages import Request
from tests.fuzz.mutations import spoiled
from tests.fuzz.profile import fuzz
from tests.services.decode.test_handoff import PROMPT, Cluster, cluster
from tests.simulation.clock import run
from tests.simulation.kv_link import SimulatedLink
from tests.simulation.workers import request_of

CANDIDATES = ("prefill-1", "prefill-2")
FAULTS = ("none", "flip", "cut", "header", "twice", "late", "foreign", "hold")
EXAMPLE = FrameHeader(
    placement_id=b"p" * 16,
    sequence_number=1,
    first_token=64,
    num_tokens=64,
    first_layer=0,
    num_layers=1,
    first_head=0,
    num_heads=1,
    kv_format="uint8/b16/l1/h1/d8",
    num_cached_tokens=0,
    payload_bytes=1024,
)
FIELDS = msgspec.to_builtins(EXAMPLE, builtin_types=(bytes,))
LIES = ("sequence_number", "first_token", "num_tokens", "first_layer", "num_layers", "kv_format")


@cache
def undisturbed() -> list[int]:
    async def main() -> list[int]:
        async with cluster() as it:
            return (await it.run(_request(), CANDIDATES)).output

    return run(main())


def _request() -> Request:
    return request_of(PROMPT, max_tokens=12, seed=9, temperature=1.0)


class Spoiler:
    """Stands between a link and the receiver; one fault a frame, in their order."""

    def __init__(self, it: Cluster, faults: list[str], lies: list[dict[str, Any]]) -> None:
        self._receiver = it.decode.receiver
        self._faults = iter(faults)
        self._lies = iter(lies)
        self._take = self._receiver.take
        self.seen: list[tuple[SimulatedLink, FrameHeader, bytes]] = []
        self.num_spoilt = 0
        self._receiver.take = self.take  # type: ignore[method-assign]

    async def take(self, link: SimulatedLink, header: FrameHeader, payload: bytearray) -> None:
        fault = next(self._faults, "none")
        self.seen.append((link, header, bytes(payload)))
        self.num_spoilt += fault in ("flip", "cut", "foreign")
        match fault:
            case "flip":
                payload[len(payload) // 2] ^= 4
            case "cut":
                del payload[-1:]
            case "header":
                header = self._lie(header)
            case "twice":
                await self._take(link, header, bytearray(payload))
            case "late":  # what came first of all, once more
                await self._again(*self.seen[0])
            case "foreign":
                header = msgspec.structs.replace(header, placement_id=bytes(16))
            case "hold":
                await asyncio.sleep(0.03)
        await self._take(link, header, payload)

    def _lie(self, header: FrameHeader) -> FrameHeader:
        told = next(self._lies, {})
        changed = {name: told[name] for name in LIES if name in told}
        changed = {name: value for name, value in changed.items() if value != FIELDS[name]}
        try:
            lie = msgspec.convert(
                msgspec.structs.asdict(header) | changed, FrameHeader, strict=True
            )
        except msgspec.ValidationError:
            raise FrameRefused("no header") from None
        if (fault := fault_of(lie)) is not None:
            raise FrameRefused(fault)
        self.num_spoilt += lie != header and lie.sequence_number == header.sequence_number
        return lie

    async def _again(self, link: SimulatedLink, header: FrameHeader, payload: bytes) -> None:
        try:
            await self._take(link, header, bytearray(payload))
        except FrameRefused:
            return


faults = st.lists(st.sampled_from(FAULTS), min_size=1, max_size=12)
lies = st.lists(spoiled([FIELDS]).filter(lambda tree: isinstance(tree, dict)), max_size=6)


@fuzz(60)
@given(faults, lies)
def test_spoilt_frames_never_change_a_token(faults: list[str], lies: list[dict[str, Any]]) -> None:
    expected = undisturbed()

    async def main() -> None:
        broken: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, each: broken.append(each))
        async with cluster() as it:
            spoiler = Spoiler(it, faults, lies)
            received = await it.run(_request(), CANDIDATES)
            assert received.output == expected
            await it.settled()
            counts = it.decode.receiver.counts
            num_told = counts.num_corrupt + counts.num_refused + counts.num_unknown
            assert num_told >= min(spoiler.num_spoilt, 1)
            placements = it.decode.receiver._placements
            assert not placements._expected
            assert not placements._num_copying
            for each in spoiler.seen:  # all of them once more: nobody waits for them now
                await spoiler._again(*each)
            assert counts.num_unknown >= len(spoiler.seen)
            assert it.decode.is_empty
            assert (await it.run(_request(), CANDIDATES)).output == expected
        assert not broken, broken

    run(main())
