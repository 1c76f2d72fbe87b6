"""Writes the secrets of a deployment, as files and as Kubernetes Secrets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from services.cli.deployment.kubernetes_secrets import check_kubernetes_names, kubernetes_secrets
from services.cli.deployment.secret_folder import complete_folder, processes_of, record_with

REDIS_OF_COMPOSE, REDIS_OF_KUBERNETES = "redis", "hearth-redis"


def write_secrets(
    path: Path | None,
    processes: Sequence[str] | None,
    *,
    tls: str | None,
    redis_host: str | None,
    namespace: str | None,
) -> None:
    """Completes the folder at `path`, or a temporary one, and with a namespace prints its
    Secrets. Raises ConfigError.
    """
    record = record_with(path, processes or (), redis_host=redis_host, tls=tls)
    named = processes_of(record)
    if namespace is not None:
        check_kubernetes_names(named, namespace)
    default_host = REDIS_OF_COMPOSE if namespace is None else REDIS_OF_KUBERNETES
    with ExitStack() as stack:
        if path is None:
            path = Path(stack.enter_context(TemporaryDirectory()))
        folder = complete_folder(path, record, default_host=default_host)
        if namespace is not None:
            print(kubernetes_secrets(folder, namespace), end="")
        else:
            print(f"{path}: secrets of {len(named)} processes; keep them private", file=sys.stderr)
