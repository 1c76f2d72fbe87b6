"""Hosts, their ranks and the links between them, as measured or as an operator states them. Pure.

{"hosts": [{"name": "a", "num_ranks": 4}, {"name": "b", "num_ranks": 4}],
 "links": [{"hosts": ["a", "b"], "link": {"latency_s": 0.01, "bytes_per_s": 125e6}}]}
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_HOSTS = 8
MAX_FILE_BYTES = 1 << 20

_Seconds = Annotated[float, Meta(ge=0, lt=1e6)]
_Rate = Annotated[float, Meta(gt=0, lt=1e18)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of an empty message one way, and bytes a second."""

    latency_s: _Seconds
    bytes_per_s: _Rate

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


# An exchange over Gloo, between hosts: the receiver's buffer is announced, then the sender sends.
EXCHANGE_LATENCIES = 2
SHARED_MEMORY = Link(30e-6, 5e9)  # connects two processes of a CPU host


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host of a worker. `inside` is the link between two of its ranks; `device` holds the KV."""

    name: _Name
    num_ranks: Annotated[int, Meta(ge=1, le=64)]
    inside: Link = SHARED_MEMORY
    device: Literal["cpu", "cuda"] = "cpu"


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: tuple[_Name, _Name]
    link: Link


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All hosts, and the link of each pair of them, in either direction.

    `rank_bytes_per_s` is the rate at which a rank reads weights, all of them for each token.
    """

    hosts: tuple[Host, ...]
    links: tuple[HostLink, ...] = ()
    rank_bytes_per_s: _Rate = 10e9

    @property
    def num_ranks(self) -> int:
        return sum(host.num_ranks for host in self.hosts)

    def between(self, first: Host, second: Host) -> Link:
        """Returns the link between two hosts. Raises ValueError if this pair is not in the
        table.
        """
        if first is second:
            return first.inside
        pair = {first.name, second.name}
        for each in self.links:
            if set(each.hosts) == pair:
                return each.link
        raise ValueError(f"the link between {first.name} and {second.name} is not in the table")


class RankLink(msgspec.Struct, frozen=True):
    """A link between two ranks, as they measured it."""

    first: int
    second: int
    link: Link


def read_links(path: Path) -> LinkTable:
    """Returns a table from a file of JSON, or of TOML if its name ends in .toml. Raises
    ValueError.
    """
    try:
        with path.open("rb") as file:  # it may have no end
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes: not a table of links")
    return decode_links(data, is_toml=path.suffix == ".toml")


def decode_links(data: bytes, *, is_toml: bool = False) -> LinkTable:
    """Decodes a table of links. Raises ValueError, which names the field."""
    try:
        table = _decoded(data, is_toml=is_toml)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"not a table of links: {error}") from error
    names = [host.name for host in table.hosts]
    if not 1 <= len(names) <= MAX_HOSTS or len(set(names)) < len(names):
        raise ValueError(f"hosts {names}: 1 to {MAX_HOSTS} of different names are needed")
    for each in table.links:
        if not set(each.hosts) <= set(names) or len(set(each.hosts)) < 2:
            raise ValueError(f"a link between {' and '.join(each.hosts)}: not two of the hosts")
    return table


def _decoded(data: bytes, *, is_toml: bool) -> LinkTable:
    if is_toml:
        return msgspec.convert(tomllib.loads(data.decode()), LinkTable)
    return msgspec.json.decode(data, type=LinkTable)
