"""Finds gateways of other sites that share a name, and other sites that do: they connect with one
key. No I/O.

A gateway that restarts has a new epoch, and the old one never comes back. All gateways of a site
have one cluster secret and one NATS, of which each state has a digest. While the secret is replaced
it has one of each value: a gateway that has read it and one that has not share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from math import inf

DOUBLED_S = 10.0  # without another epoch, until a name counts as that of one gateway again
MAX_GATEWAYS = 4096  # the last ones are remembered
MAX_EPOCHS = 4
INSTANCE_BYTES = 8
MAX_KEYS = 2  # of a state: those of a secret that is replaced


@dataclass(slots=True)
class _Epochs:
    heard_at: dict[int, float] = field(default_factory=dict)  # the last one last
    doubled_at: float = -inf


class GatewayEpochs:
    def __init__(self) -> None:
        self._known: dict[str, _Epochs] = {}

    def is_doubled(self, gateway_id: str, epoch: int, now: float) -> bool:
        """Records a state. Returns whether two gateways have this name: requests to it reach both,
        and their tokens would mix.
        """
        known = self._known.pop(gateway_id, None) or _Epochs()
        self._known[gateway_id] = known
        if len(self._known) > MAX_GATEWAYS:
            del self._known[next(iter(self._known))]
        last = next(reversed(known.heard_at), epoch)
        is_back = epoch != last and now - known.heard_at.get(epoch, -inf) < DOUBLED_S
        if is_back:
            known.doubled_at = now
        known.heard_at.pop(epoch, None)
        known.heard_at[epoch] = now
        if len(known.heard_at) > MAX_EPOCHS:
            del known.heard_at[next(iter(known.heard_at))]
        return now - known.doubled_at < DOUBLED_S


def site_instance(public_keys: Iterable[bytes], server_name: str) -> bytes:
    """Returns what tells a site from another one of its name: digests of the public keys with which
    it signs, if it has a secret, each with the NATS server or cluster of its processes. The first
    MAX_KEYS count, in any order.
    """
    keys = sorted(islice(public_keys, MAX_KEYS)) or [b""]
    return b"".join(
        blake2b(each + server_name.encode(), digest_size=INSTANCE_BYTES).digest() for each in keys
    )


def _digests(instance: bytes) -> set[bytes]:
    starts = range(0, len(instance), INSTANCE_BYTES)
    return {instance[start : start + INSTANCE_BYTES] for start in starts}


@dataclass(slots=True)
class _Instances:
    heard_at: dict[bytes, float] = field(default_factory=dict)  # the last one last
    doubled_at: float = -inf

    def is_back(self, instance: bytes, now: float) -> bool:
        """Records an instance. Returns whether another one came between it and its last state."""
        heard = self.heard_at
        digests = _digests(instance)
        same = next((each for each in reversed(heard) if digests & _digests(each)), None)
        is_last = same == next(reversed(heard), None)
        heard_at = -inf if same is None else heard.pop(same)
        heard[instance] = now
        if len(heard) > MAX_EPOCHS:
            del heard[next(iter(heard))]
        return not is_last and now - heard_at < DOUBLED_S


class SiteInstances:
    """The instances of the sites to which this one has links."""

    def __init__(self) -> None:
        self._known: dict[str, _Instances] = {}

    def is_doubled(self, site: str, instance: bytes, now: float) -> bool:
        """Records a state's `instance`. Returns whether another one has come in turns with it,
        within DOUBLED_S.
        """
        known = self._known.setdefault(site, _Instances())
        if instance and known.is_back(instance, now):
            known.doubled_at = now
        return now - known.doubled_at < DOUBLED_S

    def doubled(self, now: float) -> tuple[str, ...]:
        """Returns the sites that look like two."""
        found = (s for s, each in self._known.items() if now - each.doubled_at < DOUBLED_S)
        return tuple(sorted(found))
