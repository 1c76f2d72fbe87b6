"""Runs that are killed, fill the disk or overlap: finished files remain, partial ones do not."""

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


def kill_at(verb: str, source: Path, target: Path, step: str) -> None:
    script = KILLED.format(verb=verb)
    child = subprocess.run([sys.executable, "-c", script, source, target, step], timeout=180)
    assert child.returncode == -signal.SIGKILL
    assert not target.exists()


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.mark.parametrize(
    "moment", ["model-2.safetensors", "model-2.safetensors, verified", "config.json"]
)
def test_killed_compression_resumes(tmp_path: Path, moment: str) -> None:
    source, expected, _ = bundled(tmp_path, num_shards=3)
    target, partial = tmp_path / "new", tmp_path / "new.partial"
    kill_at("compress", source, target, moment)
    first = identity(partial / FIRST)
    is_last_done = moment == "config.json"
    assert (partial / LAST).exists() is is_last_done
    progress = Silent()
    compress_folder(source, target, progress)
    assert identity(target / FIRST.removeprefix("files/")) == first
    assert contents(target) == contents(expected)
    assert not partial.exists()
    assert ("model-2.safetensors, kept" in progress.steps) is is_last_done
    assert progress.num_done == progress.num_expected


def test_files_of_a_killed_run_are_verified(tmp_path: Path) -> None:
    """One shard is corrupt on disk, one has a changed source, and one has no source any more."""
    source, expected, _ = bundled(tmp_path, num_shards=3)
    target, partial = tmp_path / "new", tmp_path / "new.partial"
    kill_at("compress", source, target, "config.json")
    corrupt = partial / FIRST
    content = bytearray(corrupt.read_bytes())
    content[-5] ^= 1
    corrupt.write_bytes(content)
    changed = tensors_of_all_kinds(1)
    name, (dtype, shape, data) = next(iter(changed.items()))
    changed[name] = dtype, shape, data[::-1]
    (source / "model-1.safetensors").write_bytes(safetensors_of(changed, padding=1))
    (source / "model-2.safetensors").unlink()
    (source / ".hidden").write_text("changed")
    assert (partial / "files" / ".hidden").exists()
    progress = Silent()
    compress_folder(source, target, progress)
    reused = {step.partition(",")[0] for step in progress.steps if step.endswith("kept")}
    assert reused == {"model-0.safetensors"}
    assert not (target / "model-2.hearth.safetensors").exists()
    decompress_folder(target, tmp_path / "again", Silent())
    assert contents(tmp_path / "again") == contents(source)
    assert (target / FIRST.removeprefix("files/")).read_bytes() == (
        expected / FIRST.removeprefix("files/")
    ).read_bytes()


def test_killed_decompression_resumes(tmp_path: Path) -> None:
    source, bundle, _ = bundled(tmp_path, num_shards=3)
    target = tmp_path / "again"
    kill_at("decompress", bundle, target, "model-2.safetensors")
    done = target.with_name("again.partial") / "files"
    first = identity(done / "model-0.safetensors")
    corrupt = bytearray((done / "model-1.safetensors").read_bytes())
    corrupt[-1] ^= 1
    (done / "model-1.safetensors").write_bytes(corrupt)
    progress = Silent()
    decompress_folder(bundle, target, progress)
    assert contents(target) == contents(source)
    assert identity(target / "model-0.safetensors") == first
    assert "model-1.safetensors, kept" not in progress.steps
    assert progress.num_done == progress.num_expected


def test_full_disk_is_reported_and_finished_files_remain(tmp_path: Path) -> None:
    """A limit on the file size makes a write fail, as on a full disk."""
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
    error_line = child.stderr.strip().splitlines()[-1]
    assert os.strerror(errno.EFBIG) in error_line
    assert "finished files remain in new.partial" in error_line
    assert sorted(contents(tmp_path / "new.partial")) == [FIRST, "lock"]
    first = identity(tmp_path / "new.partial" / FIRST)
    compress_folder(source, target, Silent())
    assert identity(target / FIRST.removeprefix("files/")) == first


def test_concurrent_compression_is_rejected(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model")
    with work_folder(tmp_path / "new", tmp_path / "old") as work:
        work.path("begun").touch()
        with pytest.raises(ConfigError, match="new: another process is writing it"):
            compress_folder(source, tmp_path / "new", Silent())
        assert work.path("begun").exists()
    compress_folder(source, tmp_path / "new", Silent())
    assert not (tmp_path / "new" / "begun").exists()


def test_failure_before_the_first_file_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"new: no more$"),
        work_folder(tmp_path / "new", tmp_path / "old"),
    ):
        raise OSError(errno.ENOSPC, "no more")
    assert not list(tmp_path.iterdir())


def test_work_folder_with_links_is_rejected(tmp_path: Path) -> None:
    """The links would lead to files outside the work folder, which would be removed."""
    others = tmp_path / "others"
    others.mkdir()
    (others / "precious").touch()
    root = tmp_path / "new.partial"
    root.mkdir()
    (root / "lock").touch()
    (root / "files").symlink_to(others)
    with (
        pytest.raises(ConfigError, match="an interrupted run"),
        work_folder(tmp_path / "new", tmp_path / "old"),
    ):
        pass
    assert (others / "precious").exists()


def test_empty_work_folder_of_a_killed_run_is_reused(tmp_path: Path) -> None:
    (tmp_path / "new.partial").mkdir()
    with work_folder(tmp_path / "new", tmp_path / "old") as work:
        work.path("begun").touch()
    assert (tmp_path / "new.partial" / "files" / "begun").exists()
