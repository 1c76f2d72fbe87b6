"""Where the files of a catalogue's source are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.models.model_source import source_dir
from shared.errors import ConfigError


def test_directory_is_itself(tmp_path: Path) -> None:
    assert source_dir(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_hub_id_is_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    cache = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    folder = cache / "models--acme--small"
    for source, reason in (
        ("acme/small", f"neither a directory on this machine nor in its cache {cache}"),
        ("/models/none", "'/models/none' is not a directory on this machine"),
    ):
        with pytest.raises(ConfigError, match=reason):
            source_dir(source)
    snapshot = folder / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee\n")
    assert source_dir("acme/small") == snapshot
