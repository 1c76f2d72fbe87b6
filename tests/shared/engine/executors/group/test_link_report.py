"""Links that ranks measured are logged, and a better plan with them."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

import shared
from shared.engine.executors.group.link_report import report_links
from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.links import SHARED_MEMORY, Link, RankLink
from shared.engine.parallel.mesh_shape import MeshShape

DEMO_MODEL_DIR = Path(shared.__file__).parent / "demo_model"
SLOW = Link(0.01, 125e6)
HOSTS = ("a", "a", "b", "b")
LINKS = (RankLink(0, 1, SHARED_MEMORY), RankLink(0, 2, SLOW))


def reported(shape: MeshShape) -> list[dict]:
    config = read_config(DEMO_MODEL_DIR)
    with capture_logs() as logs:
        report_links(config, shape, HOSTS, LINKS, dtype="bfloat16", activations="plain")
    return logs


def test_plan_is_told_if_it_differs() -> None:
    first, second, differs = reported(MeshShape(4))
    assert (first["hosts"], second["hosts"]) == (("a", "a"), ("a", "b"))
    assert second["latency_us"] == 10_000 and second["mbytes_per_s"] == 125
    assert differs["event"] == "parallel_plan_differs"
    assert differs["asked"].startswith("tp 4 x pp 1, ")
    assert differs["planned"].startswith("tp 2 x pp 2, ")


def test_chosen_plan_is_not_told() -> None:
    assert [each["event"] for each in reported(MeshShape(2, 2))] == ["rank_link_measured"] * 2
