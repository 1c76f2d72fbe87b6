from pathlib import Path

import pytest

from tests.services.cli.cluster.chat_checkpoint import write_chat_checkpoint


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat_model"))
