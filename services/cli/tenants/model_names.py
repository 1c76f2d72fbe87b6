"""The names of models that a cluster knows, for limits that name some."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.cli.output import with_store
from services.local.state import clusters_dir, running_cluster
from shared.errors import ConfigError
from shared.model_registry.admin import RegistryAdmin
from shared.store import Store
from shared.tenancy.model_alias_admin import ModelAliasAdmin


def unknown_models(redis_url: str | None, names: Sequence[str]) -> list[str]:
    """Returns those names that are neither models nor aliases. A gateway's own model is in no
    record: only that of the local cluster is known. Raises ConfigError, StoreUnavailable.
    """
    if not names:
        return []

    async def read(store: Store) -> set[str]:
        models = await RegistryAdmin(store, time.time).all()
        aliases = await ModelAliasAdmin(store, time.time).all()
        return {*models, *(each.alias for each in aliases)}

    known = {*with_store(redis_url, read), _local_model()}
    return [each for each in names if each not in known]


def _local_model() -> str:
    try:
        return running_cluster(clusters_dir())[1].model_name
    except ConfigError:
        return ""
