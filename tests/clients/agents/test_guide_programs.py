"""The guides' programs for these clients run as they are written there."""

from __future__ import annotations

import pytest

from tests.clients.guide_program import run_program
from tests.support.account import AGENT_MODEL, Account
from tests.support.guide_blocks import Block, client_blocks


@pytest.mark.parametrize("block", client_blocks("agents"), ids=str)
def test_program_prints_an_answer(block: Block, account: Account) -> None:
    assert run_program(block, account, AGENT_MODEL).strip()
