"""A model's `tokenizer.json`: that of its folder, or one converted from its `tiktoken.model`.

A conversion takes seconds. It is written once, under a name with digests of what it was made from
and of itself: whoever reads it knows that it is complete and up to date.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import (
    MAX_TOKENIZER_BYTES,
    exists,
    read_checkpoint_file,
    read_checkpoint_json,
    reason_of,
)
from shared.tokenizer.tiktoken_model import (
    KIMI,
    KIMI_MODULE,
    AddedToken,
    read_ranks,
    tokenizer_json,
)

TOKENIZER_FILE, RANKS_FILE = "tokenizer.json", "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
OTHER_FORMS = ("tokenizer.model", "spiece.model", "tekken.json", "merges.txt", "vocab.json")
VERSION = 1  # changes with the conversion


class _TokenizerClasses(msgspec.Struct, frozen=True):
    """The fields of `tokenizer_config.json`. `auto_map` names the checkpoint's own classes, by
    use.
    """

    auto_map: dict[str, str | list[str | None] | None] = {}
    added_tokens_decoder: dict[str, AddedToken] = {}

    @property
    def own_class(self) -> str:
        named = self.auto_map.get("AutoTokenizer")
        found = named if isinstance(named, str) else next(iter(filter(None, named or [])), "")
        return found.rpartition("--")[2]


def tokenizer_file(model_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of a model's tokenizer. Raises CheckpointError with one line if there is
    none, or it can be had only by running code of the checkpoint.
    """
    path, ranks = model_dir / TOKENIZER_FILE, model_dir / RANKS_FILE
    if exists(path):
        return path
    config = _read_config(model_dir / CONFIG_FILE)
    if not exists(ranks):
        if not config.own_class:
            _check_other_forms(model_dir)
            return path  # missing: whoever reads it says so
        raise CheckpointError(
            f"{model_dir / CONFIG_FILE}: tokenizer {config.own_class} is code of the checkpoint, "
            f"which is never run, and there is neither {TOKENIZER_FILE} nor {RANKS_FILE}"
        )
    if not config.own_class.startswith(KIMI_MODULE):
        raise CheckpointError(
            f"{ranks}: how {config.own_class or 'this tokenizer'} splits words is not known, only "
            f"that of {KIMI_MODULE}*"
        )
    return _converted(ranks, config, _cache_dir(environ))


def _check_other_forms(model_dir: Path) -> None:
    """Raises CheckpointError for a folder whose tokenizer only transformers can convert."""
    found = next((each for each in OTHER_FORMS if exists(model_dir / each)), None)
    if found is not None:
        raise CheckpointError(
            f"{model_dir} has {found} and no {TOKENIZER_FILE}, which Hearth reads: make it with "
            f"transformers (pip install sentencepiece protobuf): AutoTokenizer.from_pretrained"
            f"({str(model_dir)!r}).save_pretrained({str(model_dir)!r})"
        )


def _read_config(path: Path) -> _TokenizerClasses:
    return read_checkpoint_json(path, _TokenizerClasses) if exists(path) else _TokenizerClasses()


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if environ.get("HEARTH_CACHE_DIR"):
        return Path(environ["HEARTH_CACHE_DIR"], "tokenizers")
    root = environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path(environ.get("HOME", tempfile.gettempdir()), ".cache")
    return base / "hearth" / "tokenizers"


def _converted(ranks_path: Path, config: _TokenizerClasses, cache_dir: Path) -> Path:
    try:
        data = read_checkpoint_file(ranks_path, max_bytes=MAX_TOKENIZER_BYTES)
        given = msgspec.json.encode([VERSION, config.added_tokens_decoder])
        source = xxhash.xxh3_128(given + data).hexdigest()
        for path in sorted(cache_dir.glob(f"{source}-*.json")):
            if path.stem.partition("-")[2] == xxhash.xxh3_128(path.read_bytes()).hexdigest():
                return path
        return _write(_convert(ranks_path, data, config), source, cache_dir)
    except OSError as error:
        raise CheckpointError(f"{ranks_path}: cannot be converted: {reason_of(error)}") from None


def _convert(ranks_path: Path, data: bytes, config: _TokenizerClasses) -> dict[str, Any]:
    try:
        added = {int(token_id): each for token_id, each in config.added_tokens_decoder.items()}
        return tokenizer_json(read_ranks(data), added, KIMI)
    except CheckpointError as error:
        raise CheckpointError(f"{ranks_path}: {error.message}") from None
    except ValueError as error:
        raise CheckpointError(f"{ranks_path.parent / CONFIG_FILE}: {reason_of(error)}") from None


def _write(content: dict[str, Any], source: str, cache_dir: Path) -> Path:
    encoded = msgspec.json.encode(content)
    path = cache_dir / f"{source}-{xxhash.xxh3_128(encoded).hexdigest()}.json"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache_dir, suffix=".tmp", delete=False) as file:
        file.write(encoded)
    Path(file.name).replace(path)  # replaces the file at once: several processes may convert
    import structlog  # 0.06 s, in processes that convert nothing

    log = structlog.get_logger(__name__)
    log.info("tokenizer_converted", path=str(path), num_bytes=len(encoded))
    return path
