from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.text.model_files import ModelFiles
from tests.support.services.model_dir import write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "timing")


@pytest.fixture(scope="session")
def model_files(model_dir: Path) -> ModelFiles:
    return ModelFiles(model_dir)
