"""A data plane that spoils frames between prefill and decode.

In all cases the tokens equal those of an undisturbed run: wrong frames are rejected and recomputed.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from shared.kv_wire.link import FrameHeader
from shared.messages import Request
from tests.fuzz.mutations import spoiled
from tests.fuzz.profile import fuzz
from tests.services.decode.test_handoff import PROMPT, cluster
from tests.support.records import frame_header
from tests.support.world.clock import run
from tests.support.world.kv_link import HARMLESS, FrameFate
from tests.support.world.workers import request_of

CANDIDATES = ("prefill-1", "prefill-2")
FAULTS = ("none", "flip", "cut", "header", "twice", "late", "foreign", "hold")
EXAMPLE = frame_header(
    1024, sequence_number=1, first_token=64, num_tokens=64, kv_format="uint8/b16/l1/h1/d8"
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
    """The faults of a data plane's frames, in order."""

    def __init__(self, faults: list[str], lies: list[dict[str, Any]]) -> None:
        self._faults = iter(faults)
        self._lies = iter(lies)
        self._first: FrameHeader | None = None

    def fate(self, sender_id: str, receiver_id: str, header: FrameHeader) -> FrameFate:
        fault = next(self._faults, "none")
        self._first = self._first or header
        match fault:
            case "flip":
                return FrameFate(is_corrupt=True)
            case "cut":
                return FrameFate(is_truncated=True)
            case "header":
                return FrameFate(replacement=self._lie(header))
            case "twice":
                return FrameFate(num_copies=2)
            case "late":  # the very first frame, instead of this one
                return FrameFate(replacement=self._first)
            case "foreign":
                return FrameFate(
                    replacement=msgspec.structs.replace(header, placement_id=bytes(16))
                )
            case "hold":
                return FrameFate(stall_s=0.03)
        return HARMLESS

    def _lie(self, header: FrameHeader) -> FrameHeader:
        replacement = next(self._lies, {})
        changed = {name: replacement[name] for name in LIES if name in replacement}
        changed = {name: value for name, value in changed.items() if value != FIELDS[name]}
        try:
            return msgspec.convert(
                msgspec.structs.asdict(header) | changed, FrameHeader, strict=True
            )
        except msgspec.ValidationError:
            return header


faults = st.lists(st.sampled_from(FAULTS), min_size=1, max_size=12)
lies = st.lists(spoiled([FIELDS]).filter(lambda tree: isinstance(tree, dict)), max_size=6)


@fuzz(24)
@given(faults, lies)
@example(faults=["none", "none", "none", "late"], lies=[])  # announces more bytes than it sends
def test_spoilt_frames_never_change_a_token(faults: list[str], lies: list[dict[str, Any]]) -> None:
    expected = undisturbed()

    async def main() -> None:
        broken: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, each: broken.append(each))
        async with cluster() as it:
            spoiler, receiver = Spoiler(faults, lies), it.decode.receiver
            receiver.plane.fate = spoiler.fate
            received = await it.run(_request(), CANDIDATES)
            assert received.output == expected
            await it.settled()
            assert not receiver.num_expected
            assert it.decode.is_empty
            assert (await it.run(_request(), CANDIDATES)).output == expected
        assert not broken, broken

    run(main())
