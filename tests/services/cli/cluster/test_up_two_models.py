"""`hearth up` with two models: what it prints is of the first one."""

from pathlib import Path

import pytest

from tests.services.cli.cluster.printed_commands import check_printed_commands
from tests.services.cli.cluster.running_up import Up
from tests.support.services.running import ROOT


@pytest.mark.long
def test_printed_commands_ask_the_first_of_two_models(tmp_path: Path, chat_model: Path) -> None:
    """The second one is the first by alphabet."""
    models = (f"zebra={chat_model}", f"aardvark={ROOT / 'shared/demo_model'}")
    up = Up(tmp_path, *(word for each in models for word in ("--model", each)))
    try:
        check_printed_commands(up, "zebra", decode_worker=r"\S+")
    finally:
        up.stop()
