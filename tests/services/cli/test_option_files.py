"""Options in files: HEARTH_<OPTION>_FILE."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.secrets.option_files import read_option_files
from tests.services.cli.in_process import call_hearth


def test_file_gives_the_value_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("redis://a:b@c:6379/0\n")
    environ = {"HEARTH_REDIS_URL_FILE": str(tmp_path / "url"), "OTHER_FILE": "x"}
    read_option_files(environ)
    assert environ == {"HEARTH_REDIS_URL": "redis://a:b@c:6379/0", "OTHER_FILE": "x"}


def test_empty_name_is_ignored() -> None:
    environ = {"HEARTH_REDIS_URL_FILE": "", "HEARTH_REDIS_URL": "redis://x"}
    read_option_files(environ)
    assert environ == {"HEARTH_REDIS_URL": "redis://x"}


def test_option_that_is_given_twice_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("a")
    environ = {"HEARTH_X_FILE": str(tmp_path / "url"), "HEARTH_X": "b"}
    with pytest.raises(ConfigError, match="HEARTH_X and HEARTH_X_FILE are both set"):
        read_option_files(environ)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory"), (b"\n", "is empty"), (b"\xff\xfe", "is not text")],
)
def test_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    done = call_hearth(("scheduler",), {"HEARTH_CLUSTER_SECRET_FILE": str(path)})
    assert done.returncode == 2
    assert done.stderr.startswith(f"hearth: HEARTH_CLUSTER_SECRET_FILE {path}")
    assert reason in done.stderr and done.stderr.count("\n") == 1
