"""The key of all root hashes, made of the cluster's secret as it is now."""

from __future__ import annotations

from collections.abc import Callable

from shared.block_hash import root_key
from shared.secrets.secret import Derived, Secret


def root_key_of(secret: Secret) -> Callable[[], bytes]:
    """Returns a function that returns the key, see `block_hash.root_key`. A request keeps the root
    with which it began; after a rotation caches begin anew.
    """
    keys = Derived(secret, root_key)
    return lambda: keys.current or b""
