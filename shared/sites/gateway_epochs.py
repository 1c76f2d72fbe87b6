"""Finds gateways of other sites that share a name, and other sites that do: they connect with one
key. No I/O.

A gateway that restarts has a new epoch, and the old one never comes back. All gateways of a site
sign with the key of one cluster secret, of which each state has a part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

DOUBLED_S = 10.0  # without another epoch, until a name counts as that of one gateway again
MAX_GATEWAYS = 4096  # the last ones are remembered
MAX_EPOCHS = 4


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


class SiteSecrets:
    def __init__(self) -> None:
        self._heard: dict[str, dict[bytes, float]] = {}  # by site: those of the links

    def is_doubled(self, site: str, identity: bytes, now: float) -> bool:
        """Records a state's `key_id`. Returns whether another one comes in turns with it."""
        heard = self._heard.setdefault(site, {})
        last = next(reversed(heard), identity)
        is_back = identity != last and now - heard.get(identity, -inf) < DOUBLED_S
        if identity:
            heard.pop(identity, None)
            heard[identity] = now
        if len(heard) > MAX_EPOCHS:
            del heard[next(iter(heard))]
        return is_back
