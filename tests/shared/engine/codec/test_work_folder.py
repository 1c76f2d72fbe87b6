"""Killed halfway, out of disk, or two at once: nothing is lost and nothing half is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.engine.codec.compress import compress_folder
from shared.engine.codec.decompress import decompress_folder
from shared.engine.codec.work_folder import work_folder
from shared.errors import CheckpointError, ConfigError
from tests.shared.engine.codec.folders import (
    Silent,
    bundled,
    contents,
    safetensors_of,
    tensors_of_all_kinds,
    write_folder,
)

FIRST, LAST = "files/below/part.hearth.safetensors", "files/model-2.hearth.safetensors"
KILLED = """
import os, signal, sys
from pathlib import Path
from shared.engine.codec.{verb} import {verb}_folder

class Killer:
    def expect(self, num_bytes): pass
    def advance(self, what, num_bytes):
        if what == sys.argv[3]:
            os.kill(os.getpid(), signal.SIGKILL)

{verb}_folder(Path(sys.argv[1]), Path(sys.argv[2]), Killer())
"""


def kill_at(verb: str, source: Path, target: Path, what: str) -> None:
    script = KILLED.format(verb=verb)
    child = subprocess.run([sys.executable, "-c", script, source, target, what], timeout=180)
    assert child.returncode == -signal.SIGKILL
    assert not target.exists()


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.mark.parametrize(
    "moment", ["model-2.safetensors", "model-2.safetensors, verified", "config.json"]
)
def test_killed_halfway_it_goes_on(tmp_path: Path, moment: str) -> None:
    source, whole, _ = bundled(tmp_path, num_shards=3)
    target, partial = tmp_path / "new", tmp_path / "new.partial"
    kill_at("compress", source, target, moment)
    first = identity(partial / FIRST)
    is_last_done = moment == "config.json"
    assert (partial / LAST).exists() is is_last_done
    progress = Silent()
    compress_folder(source, target, progress)
    assert identity(target / FIRST.removeprefix("files/")) == first
    assert contents(target) == contents(whole)
    assert not partial.exists()
    assert ("model-2.safetensors, kept" in progress.said) is is_last_done
    assert progress.num_done == progress.num_expected


def test_what_a_killed_try_left_is_verified(tmp_path: Path) -> None:
    """A shard that the disk has spoiled, one whose original has changed, one that is no more."""
    source, whole, _ = bundled(tmp_path, num_shards=3)
    target, partial = tmp_path / "new", tmp_path / "new.partial"
    kill_at("compress", source, target, "config.json")
    spoilt = partial / FIRST
    content = bytearray(spoilt.read_bytes())
    content[-5] ^= 1
    spoilt.write_bytes(content)
    changed = tensors_of_all_kinds(1)
    name, (dtype, shape, data) = next(iter(changed.items()))
    changed[name] = dtype, shape, data[::-1]
    (source / "model-1.safetensors").write_bytes(safetensors_of(changed, padding=1))
    (source / "model-2.safetensors").unlink()
    (source / ".hidden").write_text("changed")
    assert (partial / "files" / ".hidden").exists()
    progress = Silent()
    compress_folder(source, target, progress)
    kept = {what.partition(",")[0] for what in progress.said if what.endswith("kept")}
    assert kept == {"model-0.safetensors"}
    assert not (target / "model-2.hearth.safetensors").exists()
    decompress_folder(target, tmp_path / "again", Silent())
    assert contents(tmp_path / "again") == contents(source)
    assert (target / FIRST.removeprefix("files/")).read_bytes() == (
        whole / FIRST.removeprefix("files/")
    ).read_bytes()


def test_decompressing_goes_on_too(tmp_path: Path) -> None:
    source, bundle, _ = bundled(tmp_path, num_shards=3)
    target = tmp_path / "again"
    kill_at("decompress", bundle, target, "model-2.safetensors")
    done = target.with_name("again.partial") / "files"
    first = identity(done / "model-0.safetensors")
    spoilt = bytearray((done / "model-1.safetensors").read_bytes())
    spoilt[-1] ^= 1
    (done / "model-1.safetensors").write_bytes(spoilt)
    progress = Silent()
    decompress_folder(bundle, target, progress)
    assert contents(target) == contents(source)
    assert identity(target / "model-0.safetensors") == first
    assert "model-1.safetensors, kept" not in progress.said
    assert progress.num_done == progress.num_expected


def test_a_full_disk_is_told_and_what_is_finished_is_kept(tmp_path: Path) -> None:
    """A limit of a file's size, which the kernel refuses as it does the last block of a disk."""
    source = write_folder(tmp_path / "model")
    tensors = tensors_of_all_kinds(5)
    tensors["huge"] = "U8", (300_000,), os.urandom(300_000)
    (source / "model-0.safetensors").write_bytes(safetensors_of(tensors))
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "sys.dont_write_bytecode = True; from services.__main__ import main;"
        "sys.argv = ['hearth', 'compress', *sys.argv[1:]]; main()"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    target = tmp_path / "new"
    child = subprocess.run(
        [sys.executable, "-c", script, source, target], capture_output=True, text=True, timeout=180
    )
    assert child.returncode == 2
    refusal = child.stderr.strip().splitlines()[-1]
    assert os.strerror(errno.EFBIG) in refusal
    assert "finished files remain in new.partial" in refusal
    assert sorted(contents(tmp_path / "new.partial")) == [FIRST, "lock"]
    first = identity(tmp_path / "new.partial" / FIRST)
    compress_folder(source, target, Silent())
    assert identity(target / FIRST.removeprefix("files/")) == first


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    with work_folder(tmp_path / "new") as work:
        work.path("begun").touch()
        with pytest.raises(ConfigError, match="new: another process is writing it"):
            compress_folder(source, tmp_path / "new", Silent())
        assert work.path("begun").exists()
    compress_folder(source, tmp_path / "new", Silent())
    assert not (tmp_path / "new" / "begun").exists()


def test_a_failure_with_nothing_done_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"new: no more$"),
        work_folder(tmp_path / "new"),
    ):
        raise OSError(errno.ENOSPC, "no more")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_links_is_nobodys_earlier_try(tmp_path: Path) -> None:
    """They would lead to files that are not the bundle's, and those would be removed."""
    others = tmp_path / "others"
    others.mkdir()
    (others / "precious").touch()
    root = tmp_path / "new.partial"
    root.mkdir()
    (root / "lock").touch()
    (root / "files").symlink_to(others)
    with pytest.raises(ConfigError, match="an interrupted run"), work_folder(tmp_path / "new"):
        pass
    assert (others / "precious").exists()


def test_a_try_that_was_killed_at_once_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "new.partial").mkdir()
    with work_folder(tmp_path / "new") as work:
        work.path("begun").touch()
    assert (tmp_path / "new.partial" / "files" / "begun").exists()
