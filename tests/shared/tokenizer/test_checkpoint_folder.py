import json
from pathlib import Path

import pytest

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_folder import check_folder, check_tokenizer

LORA = json.dumps({"base_model_name_or_path": "org/base"})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "is empty: expected a checkpoint directory, with config.json"),
        (["README.md"], r"has no config\.json: expected a checkpoint directory"),
        (
            ["config.json", "m-Q4.gguf"],
            "GGUF is not served: safetensors are needed .*; served are .*mxfp",
        ),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA adapter of org/base, which"),
        (["adapter_config.json", "adapter_model.bin"], "is a LoRA adapter of org/base"),
        (["config.json", "pytorch_model.bin"], r"in pytorch_model\.bin alone, .* not served"),
        (["config.json", "tokenizer.json"], r"has no \*\.safetensors: its weights are missing"),
        (["config.json", "model.safetensors", "pytorch_model.bin", "m.gguf"], ""),
        (["config.json", "model.safetensors", "adapter_config.json"], ""),
        (["config.json", "model.hearth.safetensors"], ""),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).write_text(LORA)
    if not words:
        check_folder(tmp_path, needs_weights=True)
        return
    with pytest.raises(CheckpointError, match=words):
        check_folder(tmp_path, needs_weights=True)


def test_weights_may_be_missing_where_they_are_not_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    check_folder(tmp_path, needs_weights=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", r"model\.gguf: GGUF is not served"),
        ("notes.txt", r"notes\.txt is a file: expected a checkpoint directory"),
        ("none", "none does not exist: expected"),
    ],
)
def test_files_are_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=words):
        check_folder(tmp_path / name, needs_weights=True)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json: copy it"):
        check_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    check_tokenizer(tmp_path)
