"""Files of a checkpoint are read by one guarded reader, whatever they are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import pytest

from shared.engine.codec.manifest import read_manifest
from shared.engine.codec.model_folder import digest_of
from shared.engine.codec.safetensors_layout import map_safetensors
from shared.engine.planning.headers import file_tensors
from shared.engine.weights.checkpoint_index import read_index
from shared.engine.weights.load import open_checkpoint
from shared.tokenizer.checkpoint_file import (
    RegularFile,
    read_checkpoint_file,
    read_checkpoint_json,
)

ROOT = Path(__file__).resolve().parents[3]
ROOMS = (
    *("shared/engine", "shared/tokenizer", "services/host"),
    *("services/gateway/text", "services/gateway/images", "services/gateway/models"),
)
_READ = re.compile(r"\.read_bytes\(|\.read_text\(|\bopen\(\s*[\w./]*path|\.open\(\"r|safe_open\(")
# Files that read what Hearth, the machine or an operator wrote.
OWN = {
    "shared/engine/executors/loading/mode_choice.py": "Hearth's own table",
    "shared/engine/executors/step_profile.py": "a recording that the process has just written",
    "shared/engine/parallel/links.py": "the kernel's tables",
    "shared/engine/parallel/processes/watchdog.py": "/proc",
    "shared/engine/weights/reading/digest_cache.py": "the cache of digests",
    "shared/engine/weights/shared_file.py": "the cache of packed weights",
    "shared/engine/weights/checkpoint_files.py": "safe_open, after the guarded reader",
    "shared/tokenizer/checkpoint_file.py": "the guarded reader",
    "shared/tokenizer/tokenizer_file.py": "the cache of converted tokenizers",
    "services/host/devices.py": "/proc",
    "services/host/records.py": "the host's own records",
    "services/host/workers/process_memory.py": "/proc",
    "services/gateway/models/model_source.py": "the cache of the hub",
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "text": ("config.json", read_checkpoint_file),
    "json": ("config.json", lambda path: read_checkpoint_json(path, dict)),
    "header": ("model.safetensors", file_tensors),
    "mapped file": ("model.safetensors", map_safetensors),
    "digest": ("model.safetensors", digest_of),
    "tensors": ("model.safetensors", lambda path: open_checkpoint(path.parent).__enter__()),
    "index": ("model.safetensors.index.json", lambda path: read_index(path.parent)),
    "manifest": ("hearth_bundle.json", lambda path: read_manifest(path.parent)),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_take_regular_files_alone(tmp_path: Path, reader: str) -> None:
    """None waits for ever at a pipe, or reads a device without an end."""
    name, read = READERS[reader]
    (tmp_path / name).symlink_to("/dev/null")  # a reader without the guard finds an empty file
    with pytest.raises(Exception, match="is not a regular file"):
        read(tmp_path / name)


def test_reads_do_not_wait_for_bytes() -> None:
    """Files of the kernel such as its log look regular: a pipe stands for one here."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with (
        BufferedReader(RegularFile(reading)) as file,
        pytest.raises(OSError, match="has no bytes to read now"),
    ):
        file.read(8)
    os.close(writing)


def test_only_own_files_are_read_without_the_guard() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if _READ.search(path.read_text())
    }
    assert found == OWN.keys()
