"""Everything that processes of a simulated fleet send, store and write down, searched in passing.

A placement's id stands for its tokens, which may be few: it is searched for like them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from shared.kv_wire.link import FrameHeader
from shared.messages import PrefixDigest, StartDecode
from shared.sites.prefix_fingerprints import unpack_fingerprints
from tests.simulation.residency.borders import Borders, Place
from tests.simulation.residency.plan import PLANTED
from tests.support.canaries.canary import Canary
from tests.support.canaries.search import CanarySearch, Pieces, Sighting
from tests.support.world.bus import INBOX
from tests.support.world.process import SimulatedProcess

SEARCHED_BYTES = 4 << 20
_start = msgspec.msgpack.Decoder(StartDecode).decode
_digest = msgspec.msgpack.Decoder(PrefixDigest).decode
_encode = msgspec.msgpack.Encoder().encode


class Traffic:
    def __init__(
        self,
        search: CanarySearch,
        fingerprints: Mapping[int, str],
        borders: Borders,
        region_of: Callable[[SimulatedProcess], str],
    ) -> None:
        self.num_bytes = self.num_messages = 0
        self.num_of_classes = 0  # fingerprints in digests of region classes
        self._search, self._fingerprints, self._borders = search, fingerprints, borders
        self._region_of = region_of
        self._pieces = Pieces()
        self._placements: list[Canary] = []

    def message(
        self,
        sender: SimulatedProcess | None,
        subject: str,
        data: bytes,
        receivers: list[SimulatedProcess],
    ) -> None:
        """`sender` None: it is at another site, where its message was seen already."""
        ends = receivers if sender is None else (sender, *receivers)
        regions = frozenset(map(self._region_of, ends))
        is_reply = subject.startswith(INBOX)
        if subject.endswith(".start") and not is_reply:
            self._note_placement(_start(data))
        if subject.endswith(".digest") and not is_reply:
            self._check_digest(_digest(data), subject, regions)
        self.num_messages += 1
        self.add("subject", subject_pattern(subject), regions, subject.encode() + b" " + data)

    def frame(
        self, sender: SimulatedProcess, receiver: SimulatedProcess, header: FrameHeader, kv: bytes
    ) -> None:
        regions = frozenset(map(self._region_of, (sender, receiver)))
        self.add("frame", "KV", regions, _encode(header) + kv)

    def write(self, region: str, keys: tuple[str, ...], data: bytes) -> None:
        name = subject_pattern(keys[0]) if keys else "no key"
        self.add("Redis", name, frozenset({region}), b" ".join(map(str.encode, keys)) + b" " + data)

    def span(self, data: bytes) -> None:
        """No span may have anything of a tenant, wherever it is."""
        self.add("span", "OTLP", None, data)

    def log(self, event: str, line: bytes) -> None:
        self.add("log", event, None, line)

    def add(self, kind: str, name: str, regions: frozenset[str] | None, data: bytes) -> None:
        at_s = asyncio.get_running_loop().time()
        self._pieces.add(Place(kind, name, regions, at_s), data)
        if len(self._pieces) > SEARCHED_BYTES:
            self.search()

    def files(self, folder: Path) -> None:
        """Searches the files that the run has written: nothing of a tenant may be on disk."""
        for path in sorted(folder.rglob("*")):
            self.add("file", path.name, None, path.read_bytes())

    def search(self) -> None:
        self.num_bytes += len(self._pieces)
        self._search.add(self._placements)
        self._placements.clear()
        self._borders.judge(self._pieces.take(self._search))

    def _note_placement(self, command: StartDecode) -> None:
        tenant_id = command.request.tenant_id.rpartition("/")[2]
        others = {"placement": command.placement_id}
        self._placements.append(Canary(tenant_id=tenant_id, others=others))

    def _check_digest(self, digest: PrefixDigest, subject: str, regions: frozenset[str]) -> None:
        name, at_s = subject_pattern(subject), asyncio.get_running_loop().time()
        for fingerprint in unpack_fingerprints(digest.added + digest.removed):
            tenant_id = self._fingerprints.get(fingerprint)
            if tenant_id is None:
                continue
            place = Place("digest", name, regions, at_s)
            if not self._borders.may_name(tenant_id, digest.region_class, at_s):
                place = Place("digest", f"{name} of {digest.region_class!r}", None, at_s)
            self.num_of_classes += bool(digest.region_class) and tenant_id != PLANTED
            self._borders.judge([(place, Sighting(tenant_id, "fingerprint", 0))])


@lru_cache(100_000)
def subject_pattern(subject: str) -> str:
    """Returns the subject or key without names, to count leaks by it."""
    return re.sub(r"[^.:]*[0-9%][^.:]*", "*", subject.replace("v1", "v")).replace("v.", "v1.", 1)


def pieces_of(value: Any) -> Iterator[bytes]:
    """Yields the bytes in a value of the simulated Redis."""
    match value:
        case bytes():
            yield value
        case str():
            yield value.encode()
        case dict():
            for name, each in value.items():
                yield from pieces_of(name)
                yield from pieces_of(each)
        case list() | tuple() | set():
            for each in value:
                yield from pieces_of(each)
        case _:
            yield repr(value).encode()
