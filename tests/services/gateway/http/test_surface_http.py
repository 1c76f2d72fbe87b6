"""What a running gateway shows of itself, beside its record in `tests/surface`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.conftest import Cluster
from tests.surface.recording import check_record, json_lines


async def test_surface_document(cluster: Cluster) -> None:
    document = sorted_lists((await cluster.http.get("/openapi.json")).json())
    document["info"].pop("version")
    check_record("openapi.json", json_lines(document, depth=5))


def sorted_lists(value: Any) -> Any:
    """Litestar's order of parameters and tags is that of a set."""
    if isinstance(value, dict):
        return {name: sorted_lists(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return sorted(map(sorted_lists, value), key=json.dumps)
    return value


@pytest.mark.parametrize("names", ["hearth", "vllm"])
async def test_surface_metrics(cluster: Cluster, names: str) -> None:
    text = (await cluster.http.get("/metrics", params={"names": names})).text
    described = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(described) > 20
    check_record(f"metrics_of_gateway_{names}.txt", "\n".join(sorted(described)))
