"""Files that operators name, and standard input."""

from __future__ import annotations

import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from services.cli.options import MAX_BYTES, read_given_file
from shared.errors import ConfigError


@pytest.mark.parametrize("is_piped", [True, False])
def test_bytes_are_read_as_they_are_and_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_piped: bool
) -> None:
    def read(data: bytes) -> bytes:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(data), encoding="ascii"))
        (tmp_path / "file").write_bytes(data)
        return read_given_file(Path("-") if is_piped else tmp_path / "file", what="--file")

    for data in ("日本\r\n".encode(), b"\xff", b"x" * MAX_BYTES):
        assert read(data) == data
    for data in ("日".encode() * (MAX_BYTES // 3 + 1), b"x" * (MAX_BYTES + 1)):
        with pytest.raises(ConfigError, match=f"--file .* has more than {MAX_BYTES} bytes"):
            read(data)
