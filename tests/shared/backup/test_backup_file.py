"""The file of a backup: what it gives back, and one clear line for every other file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag

from shared.backup.backup_file import (
    CHUNK_BYTES,
    BackupFile,
    BackupHeader,
    FileKey,
    read_key,
    writing_backup,
)
from shared.backup.records import Stored, StoredHash, StoredResponse, StoredValue
from shared.errors import ConfigError

KEY_TEXT, SALT = b"0123456789abcdef" * 4, "00112233445566778899aabbccddeeff"
TEXT = b"what a tenant has asked"
RECORDS: list[Stored] = [
    StoredHash(key="hearth:sites", fields=[(b"a", b"\xff\x00"), (b"b", b"")]),
    *(
        StoredResponse(
            tenant_id="acme",
            response_id=f"resp_{number}",
            data=TEXT + bytes([number]) * CHUNK_BYTES,
            previous=b"",
            used_at=1.5,
            ends_at=2.5,
        )
        for number in range(3)
    ),
    StoredValue(key="hearth:region_classes", value=b"{}"),
]


def write(path: Path, key: FileKey | None = None, **changes: object) -> Path:
    header = BackupHeader(
        **{
            **{"backup_id": "b", "release": "1.2", "generation": "g", "made_at": 3.0},
            **({} if key is None else {"salt": SALT, "key_check": key.check}),
            **changes,
        }  # type: ignore[arg-type]
    )
    with writing_backup(path, header, key) as add:
        for each in RECORDS:
            add(each)
    return path


@pytest.mark.parametrize("key_text", [None, KEY_TEXT])
def test_file_gives_back_what_was_written(tmp_path: Path, key_text: bytes | None) -> None:
    key = None if key_text is None else FileKey(key_text, SALT)
    path = write(tmp_path / "b", key)
    assert path.stat().st_mode & 0o777 == 0o600
    backup = BackupFile(path, key_text)
    assert [*backup.records()] == [*backup.records()] == RECORDS
    assert (backup.header.generation, backup.header.made_at) == ("g", 3.0)
    assert (b"hearth:sites" in path.read_bytes()) is False
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_sealed_chunks_have_their_places(tmp_path: Path) -> None:
    """Two chunks that have changed places are found although the checksum is right."""
    key = FileKey(KEY_TEXT, SALT)
    with pytest.raises(InvalidTag):
        key.open(1, key.seal(0, b"a"))
    assert key.open(0, key.seal(0, b"a")) == b"a"


def cut(data: bytes, where: float) -> bytes:
    return data[: int(len(data) * where)]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: cut(data, 0.5),
    "without its end": lambda data: data[:-1],
    "with the header alone": lambda data: data.partition(b"\n")[0] + b"\n",
    "with more": lambda data: data + b"x",
    "altered": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "altered in its header": lambda data: data.replace(b'"g"', b'"h"', 1),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("key_text", [None, KEY_TEXT])
def test_damaged_file_is_refused(tmp_path: Path, name: str, key_text: bytes | None) -> None:
    path = write(tmp_path / "b", None if key_text is None else FileKey(key_text, SALT))
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.raises(ConfigError, match="truncated or damaged"):
        BackupFile(path, key_text)


@pytest.mark.parametrize("salt", ["zz" * 16, "00" * 64])
def test_damaged_salt_is_refused_in_one_line(tmp_path: Path, salt: str) -> None:
    """The salt is read before the checksum can be computed."""
    path = write(tmp_path / "b", FileKey(KEY_TEXT, SALT), salt=salt)
    with pytest.raises(ConfigError, match="truncated or damaged"):
        BackupFile(path, KEY_TEXT)


def test_other_files_and_keys_are_refused_in_one_line(tmp_path: Path) -> None:
    sealed = write(tmp_path / "sealed", FileKey(KEY_TEXT, SALT))
    (tmp_path / "other").write_text("* * * * *")
    (tmp_path / "empty").write_bytes(b"")
    newer = write(tmp_path / "newer", hearth_backup=2, release="9.9")
    cases: list[tuple[Path, bytes | None, str]] = [
        (sealed, None, "is encrypted: --key-file"),
        (sealed, KEY_TEXT[::-1], "another key"),
        (tmp_path / "other", None, "is no backup of Hearth"),
        (tmp_path / "empty", None, "is no backup of Hearth"),
        (newer, None, "format 2, made by release 9.9: this release reads formats up to 1"),
        (tmp_path / "missing", None, "No such file"),
        (tmp_path, None, "Is a directory"),
    ]
    for path, key_text, line in cases:
        with pytest.raises(ConfigError) as raised:
            BackupFile(path, key_text)
        assert line in raised.value.message
        assert "\n" not in raised.value.message
    (tmp_path / "key").write_text("short")
    for name, line in (("key", "32 at least"), ("missing", "No such file")):
        with pytest.raises(ConfigError, match=line):
            read_key(tmp_path / name)


def test_backup_replaces_a_backup_at_once_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "b")
    with pytest.raises(RuntimeError), writing_backup(path, BackupFile(path).header, None) as add:
        add(RECORDS[0])
        raise RuntimeError
    assert [*BackupFile(path).records()] == RECORDS
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is no backup: name another file"):
        write(tmp_path / "notes")
    with pytest.raises(ConfigError, match="No such file"):
        write(tmp_path / "missing" / "b")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b", "notes"]
