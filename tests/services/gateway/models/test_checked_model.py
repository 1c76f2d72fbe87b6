"""Folders that a process with limits reads before the gateway does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.gateway.models.checked_model import CheckedModels, checked_family
from services.gateway.tools.families import HERMES, KIMI
from shared.errors import ConfigError


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "m"))


def test_family_and_what_the_folder_logs(folder: Path) -> None:
    """Both warnings of it are lines of a log, beside the result."""
    changed = {"eos_token": "<|beyond|>", "chat_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    (folder / "config.json").write_text('{"vocab_size": 10}')
    assert checked_family(folder, "", "template").call_format is None
    assert checked_family(folder, "kimi", "template") == KIMI


def test_folder_is_checked_again_once_a_file_changes(folder: Path) -> None:
    models = CheckedModels("hermes")
    assert models.family(folder) == models.family(folder) == HERMES
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        models.family(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        models.family(folder / "none")
