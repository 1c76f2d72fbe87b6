import contextlib
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.credentials import Credential
from services.local.processes.start_record import StartRecord
from services.local.state import (
    LocalClusterState,
    StateDir,
    clusters_dir,
    running_cluster,
    starting_cluster,
)
from shared.errors import ConfigError


def state(url: str) -> LocalClusterState:
    return LocalClusterState(
        url=url, api_key="key", credentials=(Credential("decode", "decode-1"),)
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    directory = StateDir.create(tmp_path / "clusters")
    secret = directory.write_secret("nats.conf", "word")
    directory.publish(state("http://a"))
    assert mode(directory.path) == 0o700
    assert mode(secret) == mode(directory.path / "cluster.json") == 0o600
    directory.close(retain_logs=False)
    assert not directory.path.exists()


def test_newest_running_cluster_is_found(tmp_path: Path) -> None:
    older, newer = StateDir.create(tmp_path), StateDir.create(tmp_path)
    os.utime(older.path / "lock", (1, 1))  # both locks may get the same timestamp
    older.publish(state("http://older"))
    newer.publish(state("http://newer"))
    directory, found = running_cluster(tmp_path)
    assert (directory, found.url) == (newer.path, "http://newer")
    newer.close(retain_logs=False)
    assert running_cluster(tmp_path)[1].url == "http://older"
    older.close(retain_logs=False)


def test_url_has_the_credential_of_a_role() -> None:
    credentials = (Credential("observer", "o-1"), Credential("operator", "o-2", "word"))
    cluster = LocalClusterState(
        url="", api_key="", nats_host="h", nats_port=4222, credentials=credentials
    )
    assert cluster.nats_url_of("operator") == "nats://o-2:word@h:4222"
    assert cluster.nats_url_of("host") is None


def test_scratch_files_are_removed_at_close_or_after_a_crash(tmp_path: Path) -> None:
    crashed = StateDir.create(tmp_path)
    (crashed.scratch / "kv.sock").touch()
    assert mode(crashed.scratch) == 0o700
    assert len(str(crashed.scratch)) < 60  # a unix socket's path has 107 characters at most
    crashed._lock.close()  # as the kernel does after a crash
    living = StateDir.create(tmp_path)
    assert not crashed.scratch.exists()
    living.close(retain_logs=True)
    assert not living.scratch.exists()


def test_cluster_of_another_version_is_an_error(tmp_path: Path) -> None:
    directory = StateDir.create(tmp_path)
    directory.write_secret("cluster.json", '{"address": 1}')
    with pytest.raises(ConfigError, match="another version"):
        running_cluster(tmp_path)
    directory.close(retain_logs=False)


def test_starting_cluster_is_not_found_but_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hearth up"):
        running_cluster(tmp_path)
    directory = StateDir.create(tmp_path)
    progress = StartRecord(directory.path, "http://a:8000", ["decode-1", "prefill-1"])
    own = f"a cluster is starting (process {os.getpid()}"
    for name in ("gateway-1", "prefill-1", "decode-1"):
        progress.record(name, is_ready=False)
    found, waits = starting_cluster(tmp_path), f"{own}, waits for decode-1, prefill-1)"
    assert found is not None and (found.text, found.start.url) == (waits, "http://a:8000")
    progress.record("prefill-1", is_ready=True)
    progress.record("decode-1", is_ready=True)
    with pytest.raises(ConfigError, match=re.escape(f"{own}, waits for gateway-1)")):
        running_cluster(tmp_path)
    progress.close()
    with pytest.raises(ConfigError, match=re.escape(f"{own})")):
        running_cluster(tmp_path)
    directory.publish(state("http://a"))
    assert (running_cluster(tmp_path)[1].url, starting_cluster(tmp_path)) == ("http://a", None)
    directory.close(retain_logs=False)


def test_killed_cluster_is_not_found_and_is_removed_later(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from services.local.state import StateDir, LocalClusterState\n"
        "directory = StateDir.create(pathlib.Path(sys.argv[1]))\n"
        "directory.publish(LocalClusterState(url='http://dead', api_key='key'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (dead,) = tmp_path.iterdir()
    assert (dead / "cluster.json").exists()
    with pytest.raises(ConfigError):
        running_cluster(tmp_path)
    fresh = StateDir.create(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [fresh.path.name]
    fresh.close(retain_logs=False)


def test_only_the_logs_remain_after_a_failure(tmp_path: Path) -> None:
    directory = StateDir.create(tmp_path)
    directory.write_secret("nats.conf", "word")
    (directory.logs / "decode-1.log").write_text("why")
    directory.close(retain_logs=True)
    left = {each.name for each in directory.path.rglob("*") if each.is_file()}
    assert left == {"lock", "decode-1.log"}


def test_kept_folder_outlives_clusters_and_is_found_by_commands(tmp_path: Path) -> None:
    folder, parent = tmp_path / "kept", tmp_path / "clusters"
    directory = StateDir.open(folder, parent)
    directory.publish(state("http://kept"))
    directory.write_secret("kept.json", "{}")
    assert (mode(folder), running_cluster(parent)[1].url) == (0o700, "http://kept")
    with pytest.raises(ConfigError, match=rf"in use .*process {os.getpid()}"):
        StateDir.open(folder, parent)
    directory._lock.close()  # as the kernel does after a crash
    scratch = directory.scratch
    StateDir.create(parent).close(retain_logs=False)  # removes the link, and nothing behind it
    assert list(parent.iterdir()) == []
    again = StateDir.open(folder, parent)
    assert not scratch.exists() and (folder / "kept.json").exists()
    with pytest.raises(ConfigError, match="a cluster is starting"):
        running_cluster(parent)
    again.close(retain_logs=False)
    assert sorted(each.name for each in folder.iterdir()) == ["kept.json", "lock", "logs"]
    assert list(parent.iterdir()) == []


def test_folder_with_other_files_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="other files"):
        StateDir.open(tmp_path, tmp_path / "clusters")
    assert mode(tmp_path) == 0o755


def test_unwritable_state_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot store state"):
        StateDir.create(tmp_path / "file" / "clusters")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process takes a byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_a_config_error_and_retains_nothing(tmp_path: Path) -> None:
    kept = StateDir.open(tmp_path / "kept", tmp_path / "links")
    kept.write_secret("kept.json", "{}")
    with full_disk():
        with pytest.raises(ConfigError, match="cannot store state in"):
            StateDir.create(tmp_path / "clusters")
        with pytest.raises(ConfigError, match=r"kept\.json cannot be written: File too large"):
            kept.write_secret("kept.json", '{"a": 1}')
    assert list((tmp_path / "clusters").iterdir()) == []
    assert (kept.path / "kept.json").read_text() == "{}"
    assert {each.name for each in kept.path.iterdir()} == {"kept.json", "lock", "logs", "tmp"}
    kept.close(retain_logs=False)


class Vanishing(type(Path())):  # type: ignore[misc]
    """A folder whose entries are removed as soon as they have been listed."""

    def iterdir(self) -> Iterator[Path]:
        for each in super().iterdir():
            yield each
            shutil.rmtree(each)


def test_cluster_that_vanishes_meanwhile_is_not_running(tmp_path: Path) -> None:
    StateDir.create(tmp_path)
    with pytest.raises(ConfigError, match="no local cluster is running"):
        running_cluster(Vanishing(tmp_path))


def test_state_directory_follows_xdg() -> None:
    assert clusters_dir({"XDG_STATE_HOME": "/state"}) == Path("/state/hearth/clusters")
    assert clusters_dir({"HOME": "/home/a"}) == Path("/home/a/.local/state/hearth/clusters")


@pytest.mark.parametrize("planted", ["", "open", "link", "file"])
def test_without_a_home_state_is_below_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"hearth-{os.geteuid()}"
    match planted:
        case "open":
            own.mkdir()
            own.chmod(0o777)
        case "link":
            (tmp_path / "other").mkdir(mode=0o700)
            own.symlink_to("other")
        case "file":
            own.touch(0o600)
        case _:
            assert clusters_dir({}) == clusters_dir({}) == own / "hearth" / "clusters"
            assert mode(own) == 0o700
            return
    with pytest.raises(ConfigError, match=str(own)):
        clusters_dir({})


def test_folder_of_another_user_stores_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    (tmp_path / "hearth-4242").mkdir(mode=0o700)  # of the user who runs the test
    with pytest.raises(ConfigError, match="HOME"):
        clusters_dir({})
