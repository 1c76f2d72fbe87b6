"""services/Dockerfile without Docker: its stages, and which of them compose builds."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "services" / "Dockerfile").read_text()
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
# name -> (the stage that it extends, its instructions)
STAGES = {
    name: (base, body)
    for base, name, body in re.findall(
        r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
}


def test_gpu_image_has_tritons_compiler() -> None:
    base, body = STAGES["gpu"]
    assert base in STAGES
    installed = re.search(r"apt-get install [^&]*", body)
    assert installed
    assert {"gcc", "libc6-dev"} <= set(installed[0].split())


def test_caches_of_gpu_workers_are_in_a_volume() -> None:
    """The containers' own file systems are read-only."""
    _, body = STAGES["gpu"]
    caches = re.findall(r"\w+_CACHE_(?:DIR|PATH)=(\S+)", body)
    (volume,) = (each for each in SERVICES["decode-gpu"]["volumes"] if each.startswith("cache:"))
    assert len(caches) == 2
    assert all(each.startswith(f"{volume.partition(':')[2]}/") for each in caches)


def test_no_stage_ends_as_root() -> None:
    for name, (_, body) in STAGES.items():
        users = re.findall(r"^USER (\S+)", body, re.MULTILINE)
        assert users[-1:] in ([], ["10001"]), name


def test_compose_builds_the_gpu_stage_for_gpu_workers_only() -> None:
    targets = {
        name: each["build"].get("target") for name, each in SERVICES.items() if "build" in each
    }
    assert {name for name, target in targets.items() if target == "gpu"} == {
        "prefill-gpu",
        "decode-gpu",
    }


def test_default_image_has_no_compiler() -> None:
    *_, last = STAGES
    assert STAGES[last] == ("hearth", "")
