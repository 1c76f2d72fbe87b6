"""Formats the secrets of a folder as Kubernetes Secrets, one for each process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from services.cli.deployment.secret_folder import (
    FILES_OF_ROLE,
    METRICS_TOKEN,
    SCRAPE_TOKEN,
    SecretFolder,
)
from services.local.credentials import Credential
from shared.errors import ConfigError

_SHARED = {
    "nats": {"nats.conf": "nats.conf"},
    "redis": {"users.acl": "users.acl"},
    "metrics": {METRICS_TOKEN: SCRAPE_TOKEN},
}


_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a label of RFC 1123


def check_kubernetes_names(processes: Iterable[Credential], namespace: str) -> None:
    """Raises ConfigError for names that Kubernetes does not take."""
    for each in (namespace, *(f"hearth-{process.process_id}" for process in processes)):
        if not _NAME.fullmatch(each):
            raise ConfigError(
                f"Kubernetes takes no {each!r}: lower-case letters, digits and - only, at most 63"
            )


def kubernetes_secrets(folder: SecretFolder, namespace: str) -> str:
    """Returns YAML documents: `hearth-NAME` for each process, and those of NATS, Redis and
    Prometheus. Raises ConfigError.
    """
    return "---\n".join(
        _document(f"hearth-{name}", namespace, {key: folder.text(file) for key, file in files})
        for name, files in _secrets(folder)
    )


def _secrets(folder: SecretFolder) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for each in folder.processes:
        name = each.process_id
        yield name, [("nats.nk", f"{name}.nk"), *FILES_OF_ROLE[each.role].items()]
    for name, files in _SHARED.items():
        yield name, list(files.items())


def _document(name: str, namespace: str, texts: Mapping[str, str]) -> str:
    lines = [
        "apiVersion: v1",
        "kind: Secret",
        "metadata:",
        f"  name: {name}",
        f"  namespace: {namespace}",
        "  labels: {app.kubernetes.io/part-of: hearth}",
        "stringData:",
        *(f"  {key}: {json.dumps(text)}" for key, text in texts.items()),  # JSON is YAML
    ]
    return "\n".join(lines) + "\n"
