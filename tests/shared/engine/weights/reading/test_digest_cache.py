"""Digests of files are remembered; entries that are wrong in any way change nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import msgspec
import pytest
import torch
import xxhash
from safetensors.torch import save_file
from structlog.testing import capture_logs

from shared.engine.weights.checkpoint_files import Reading, SafetensorsFile
from shared.engine.weights.load import open_checkpoint, weights_digest
from shared.engine.weights.reading.digest_cache import DigestCache
from shared.engine.weights.tensor_bytes import TensorBytes
from shared.errors import CheckpointError

NAMES = [f"tensor {i}" for i in range(9)]
LONG_AGO_NS = 10**18


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "model.safetensors"
    write(path, seed=0)
    return path


def write(path: Path, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    save_file({name: torch.randn(40, 7, generator=generator) for name in NAMES}, path)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    """Its clock shows files that were changed long ago."""
    return DigestCache(tmp_path / "cache", wall_clock_s=lambda: time.time() + 60)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors whose bytes were read for a digest."""
    names: list[str] = []
    digest = TensorBytes.digest

    def recorded(self: TensorBytes, name: str) -> str:
        names.append(name)
        return digest(self, name)

    monkeypatch.setattr(TensorBytes, "digest", recorded)
    return names


def revision(path: Path, cache: DigestCache | None) -> str:
    reading = Reading() if cache is None else Reading(digests=cache)
    with open_checkpoint(path.parent, reading) as tensors:
        found = weights_digest(tensors, b"config")
        tensors.check_unchanged()
        return found


def entry(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache").iterdir()
    return found


def test_second_revision_reads_one_tensor(
    path: Path, cache: DigestCache, computed: list[str]
) -> None:
    expected = revision(path, None)
    assert revision(path, cache) == expected
    computed.clear()
    assert revision(path, cache) == expected
    assert len(computed) == 1


def test_readers_check_each_file_once_and_files_at_once(
    path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest waits for the other file's."""
    other = path.with_name("other.safetensors")
    shutil.copy2(path, other)
    for each in (path, other):
        with ExitStack() as stack:
            file = SafetensorsFile(each, stack, Reading(digests=cache))
            expected = [file.content(name) for name in NAMES]
            file.check_unchanged()
    together, digest, names = Barrier(2), TensorBytes.digest, []

    def waiting(self: TensorBytes, name: str) -> str:
        names.append(name)
        together.wait(timeout=5)
        return digest(self, name)

    monkeypatch.setattr(TensorBytes, "digest", waiting)
    with ExitStack() as stack, ThreadPoolExecutor(8) as readers:
        files = [SafetensorsFile(each, stack, Reading(digests=cache)) for each in (path, other)]
        calls = [readers.submit(each.content, name) for name in NAMES for each in files]
        assert [call.result() for call in calls[::2]] == expected
        assert [call.result() for call in calls[1::2]] == expected
    assert len(names) == 2


def test_changed_file_is_read_again(path: Path, cache: DigestCache, computed: list[str]) -> None:
    before = revision(path, cache)
    write(path, seed=1)
    os.utime(path, ns=(LONG_AGO_NS + 1, LONG_AGO_NS + 1))
    assert revision(path, cache) == revision(path, None) != before


@pytest.mark.parametrize("is_new", [False, True])
def test_file_with_other_tensors_and_its_old_mtime_is_read_again(
    path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """The tensor that is checked is one of those that stayed."""
    monkeypatch.setattr("random.choice", lambda names: names[0])
    before, data = revision(path, cache), bytearray(path.read_bytes())
    data[-1] ^= 1
    inode, ctime_ns = path.stat().st_ino, path.stat().st_ctime_ns
    if is_new:  # the file system may give the inode again
        path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    while path.stat().st_ctime_ns == ctime_ns:  # within one step of the file system's clock
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert is_new or path.stat().st_ino == inode
    assert revision(path, cache) == revision(path, None) != before


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_fields(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """With a checksum that fits."""
    fields = msgspec.json.decode(path.read_bytes()[16:])
    change(fields)
    data = msgspec.json.encode(fields)
    path.write_bytes(xxhash.xxh3_128_digest(data) + data)


def all_digests(path: Path, digest: object) -> None:
    replace_fields(path, lambda fields: fields.update(digests=dict.fromkeys(NAMES, digest)))


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        link,
        folder,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.chmod(0o666),
        lambda path: all_digests(path, "0" * 32),
        lambda path: all_digests(path, "no digest"),
        lambda path: all_digests(path, None),
        lambda path: replace_fields(path, lambda fields: fields["digests"].popitem()),  # type: ignore[attr-defined]
        lambda path: replace_fields(path, lambda fields: fields["source"].update(num_bytes=1)),  # type: ignore[attr-defined]
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
)
def test_entry_that_is_wrong_changes_nothing(
    path: Path, cache: DigestCache, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    expected = revision(path, cache)
    spoil(entry(tmp_path))
    assert revision(path, cache) == expected
    assert revision(path, cache) == expected


def test_entry_without_a_ctime_is_as_none(
    path: Path, cache: DigestCache, computed: list[str], tmp_path: Path
) -> None:
    expected = revision(path, cache)
    replace_fields(entry(tmp_path), lambda fields: fields.pop("ctime_ns"))
    computed.clear()
    with capture_logs() as logs:
        assert revision(path, cache) == expected
    assert (sorted(computed), logs) == (NAMES, [])


def test_digests_of_other_weights_are_detected(
    path: Path, cache: DigestCache, tmp_path: Path
) -> None:
    """An entry with the digests of another model of the same shapes."""
    expected = revision(path, cache)
    own = msgspec.json.decode(entry(tmp_path).read_bytes()[16:])
    write(path, seed=1)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert revision(path, None) != expected
    own["source"]["inode"] = path.stat().st_ino
    own["ctime_ns"] = path.stat().st_ctime_ns
    data = msgspec.json.encode(own)
    entry(tmp_path).write_bytes(xxhash.xxh3_128_digest(data) + data)
    assert revision(path, cache) == revision(path, None)


def test_file_changed_just_now_is_not_remembered(path: Path, tmp_path: Path) -> None:
    """Whatever its mtime says."""
    changed_ns = path.stat().st_ctime_ns
    young = DigestCache(tmp_path / "cache", wall_clock_s=lambda: changed_ns / 1e9 + 1)
    revision(path, young)
    assert not (tmp_path / "cache").exists()


def test_cache_without_space_is_as_none(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: DigestCache
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert revision(path, cache) == revision(path, None)
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    assert revision(path, DigestCache(tmp_path / "file" / "cache")) == revision(path, None)


@pytest.mark.parametrize("change", [os.truncate, os.utime])
def test_file_that_changes_while_it_is_read_is_refused(
    path: Path, cache: DigestCache, change: Callable[..., None], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        file = SafetensorsFile(path, stack, Reading(digests=cache))
        for name in NAMES:
            file.content(name)
        change(path, 100) if change is os.truncate else change(path)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            file.check_unchanged()
    assert not (tmp_path / "cache").exists()
