"""Secrets with several values, in files that are replaced while a process runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.block_hash import root_key
from shared.secrets.option_files import OptionFile
from shared.secrets.root_key import root_key_of
from shared.secrets.secret import Derived, Secret


def test_first_line_is_used_and_all_are_accepted() -> None:
    secret = Secret("new\n\n old \n")
    assert (secret.current, secret.accepted) == ("new", ("new", "old"))
    assert [secret.matches(each) for each in ("new", "old", "new\nold", "", "ne")] == [
        *(True, True, False, False, False)
    ]
    assert (Secret("").current, Secret("").accepted, Secret("").matches("")) == ("", (), False)
    assert Secret("é").matches("é")


def test_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old\n")
    file = OptionFile("HEARTH_X_FILE", path)
    secret = Secret("old", file)
    path.write_text("old\nnew\n")
    assert secret.accepted == ("old",)
    with capture_logs() as logs:
        file.poll()
        assert secret.accepted == ("old", "new")
        path.write_text("new\nold\n")
        file.poll()
        assert secret.current == "new"
        path.touch()
        file.poll()
        assert secret.current == "new"
    assert [each["event"] for each in logs] == ["option_file_read"] * 2


@pytest.mark.parametrize("replace", [Path.unlink, lambda path: path.write_bytes(b"\xff")])
def test_file_that_cannot_be_used_leaves_the_earlier_value(
    tmp_path: Path, replace: Callable[[Path], object]
) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    file = OptionFile("HEARTH_X_FILE", path)
    secret = Secret("old", file)
    replace(path)
    with capture_logs() as logs:
        for _ in range(3):
            file.poll()
            assert secret.current == "old"
    (line,) = logs
    assert line["event"] == "option_file_unusable"
    assert line["reason"].startswith(f"HEARTH_X_FILE {path}")
    path.write_text("new")
    file.poll()
    assert secret.current == "new"


def test_derived_values_are_made_once(tmp_path: Path) -> None:
    path, made = tmp_path / "secret", list[str]()
    path.write_text("old")

    def make(value: str) -> str:
        made.append(value)
        return value.upper()

    file = OptionFile("HEARTH_X_FILE", path)
    derived = Derived(Secret("", file), make)
    assert (derived.current, derived.accepted) == ("OLD", ("OLD",))
    path.write_text("new\nold")
    file.poll()
    assert (derived.current, derived.accepted) == ("NEW", ("NEW", "OLD"))
    path.write_text("old\nnew")
    file.poll()
    assert (derived.current, made) == ("OLD", ["old", "new"])
    assert Derived(Secret(""), make).current is None


def test_roots_follow_the_secret_in_use(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old\nnew")
    file = OptionFile("HEARTH_X_FILE", path)
    key = root_key_of(Secret("", file))
    assert key() == root_key("old")
    path.write_text("new\nold")
    file.poll()
    assert key() == root_key("new")
    assert root_key_of(Secret(""))() == b""
