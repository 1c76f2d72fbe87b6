"""Folders that a process with limits reads before the gateway does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from services.gateway.models import checked_model as checked
from services.gateway.models import model_check
from services.gateway.models.checked_model import checked_model
from services.gateway.models.model_check import ModelCheck, checked_files
from services.gateway.structured.tools.families import HERMES, KIMI
from services.gateway.text.model_files import ModelFiles
from shared.errors import ConfigError


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "m"))


def test_family_and_what_the_folder_logs(folder: Path) -> None:
    """Both warnings of it are lines of a log, beside the result."""
    changed = {"eos_token": "<|beyond|>", "chat_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    (folder / "config.json").write_text('{"vocab_size": 10}')
    assert checked_model(folder, "", "template").family.call_format is None
    assert checked_model(folder, "kimi", "template").family == KIMI


def test_reply_has_what_the_files_have(folder: Path) -> None:
    files, model = ModelFiles(folder), checked_model(folder, "", "hermes")
    assert model == checked_files(files, HERMES)
    assert model.text.chat_template == files.chat_template is not None
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        checked_model(folder / "none", "", "hermes")


def test_reply_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModelCheck(checked_files(ModelFiles(folder), HERMES))
    monkeypatch.setattr(model_check, "MAX_REPLY_BYTES", 1000)
    reply = msgspec.msgpack.decode(model_check.encoded_check(found, "m"), type=ModelCheck)
    assert reply.model is None
    assert reply.failure.startswith("m: its texts take ")
    assert reply.failure.endswith("the limit is 1000")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import nothing_of_this_name", r"check failed \(status 1\): ….*'nothing_of_this_name'$"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", r"more than .* \(status -6\)$"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", r"failed \(status -15\): …$"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"was killed, or .*, twice$"),
        ("import sys; sys.stderr.write('x' * 10**6); sys.exit(3)", r"\(status 3\): …x{300}$"),
    ],
)
def test_check_that_ends_early(
    program: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits are named where they ended it, else what it printed."""
    (tmp_path / "spoiled_check.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=expected) as raised:
        checked_model(tmp_path, "", "auto", module="spoiled_check")
    assert raised.value.message.startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("number", ["SIGSTOP", "SIGKILL"])
def test_check_that_others_stop_or_kill_is_done_again(
    number: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"""
import os, pathlib, runpy, signal
flag = pathlib.Path(__file__).with_suffix(".flag")
if not flag.exists():
    flag.touch()
    os.kill(os.getpid(), signal.{number})
runpy.run_module("services.gateway.models.model_check", run_name="__main__")
"""
    (tmp_path / "interrupted_check.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checked, "SUSPECT_S", 0.05)
    monkeypatch.setattr(checked, "WALL_LIMIT_S", 20.0)
    model = checked_model(folder, "", "hermes", module="interrupted_check")
    assert model == checked_files(ModelFiles(folder), HERMES)


def test_failure_names_the_folder(folder: Path) -> None:
    fields = {"content": {}, "thinking": {"open": "t" * 300, "close": "</t>"}}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["response_template"] = {"fields": fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="a mark of 300 characters is too long") as raised:
        checked_model(folder, "", "template")
    assert raised.value.message.startswith(f"{folder}: ")
