"""Finds the NATS of a command."""

from __future__ import annotations

from services.local.state import clusters_dir, running_cluster
from shared.errors import ConfigError
from shared.subjects import CredentialRole


def find_nats(nats_url: str | None, role: CredentialRole = "observer") -> str:
    """Returns the given URL, else the local cluster's URL with its credential of this role.

    Raises ConfigError.
    """
    if nats_url is not None:
        return nats_url
    _, state = running_cluster(clusters_dir())
    found = state.nats_url_of(role)
    if found is None:
        raise ConfigError("this cluster uses an external NATS: give its URL in HEARTH_NATS_URL")
    return found
