"""Reads how sentence-transformers makes a checkpoint's vectors: `modules.json`, and the folder of
its pooling.

The model's last hidden state is pooled; a normalization follows or not, which clients choose here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidRequest
from shared.messages import Pooling
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.transport.wire_errors import UNREADABLE, one_line, printable_line

MODULES, CONFIG = "modules.json", "config.json"
MAX_REASON_CHARS = 200
_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
_FLAG = "pooling_mode_"  # starts the name of a mode's flag in older configs
_SERVED: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
T = TypeVar("T")


class SentenceModules(msgspec.Struct, frozen=True):
    """How the checkpoint's vectors are pooled, or the `reason` why they are not served."""

    pooling: Pooling | None
    reason: str = ""


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def read_sentence_modules(model_dir: Path) -> SentenceModules | None:
    """Returns None for a checkpoint that is not one of sentence-transformers."""
    if not exists(model_dir / MODULES):
        return None
    try:
        return SentenceModules(_pooling(model_dir))
    except ValueError as error:
        return SentenceModules(None, printable_line(str(error), MAX_REASON_CHARS))


def model_pooling(modules: SentenceModules | None) -> Pooling | None:
    """Returns the model's own pooling; None: it has none. Raises InvalidRequest if its vectors are
    not served.
    """
    if modules is None or modules.pooling is not None:
        return None if modules is None else modules.pooling
    raise InvalidRequest(
        f"model: {modules.reason}: only requests for embeddings with `pooling` are served",
        param="model",
    )


def _pooling(model_dir: Path) -> Pooling:
    """Raises ValueError with the reason."""
    modules = _read(model_dir, MODULES, list[_Module])
    for each in modules:
        if each.kind not in (_TRANSFORMER, _POOLING, _NORMALIZE):
            raise ValueError(f"{MODULES} has a {each.kind}, which is not supported")
    found = [each.path for each in modules if each.kind == _POOLING]
    if len(found) != 1 or found[0] in ("", "..") or Path(found[0]).name != found[0]:
        raise ValueError(f"{MODULES} has no Pooling in a folder of its own, or several")
    place = f"{found[0]}/{CONFIG}"
    modes = _modes(_read(model_dir, place, dict[str, Any]))
    if len(modes) != 1 or modes[0] not in _SERVED:
        named = " and ".join(modes) or "nothing"
        raise ValueError(f"{place}: pooling by {named} is not supported, only lasttoken and mean")
    return _SERVED[modes[0]]


def _modes(config: dict[str, Any]) -> list[str]:
    """Returns the names of the modes; without a flag of its own, the mean is one."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [str(each) for each in (mode if isinstance(mode, list) else [mode])]
    flags = {f"{_FLAG}mean_tokens": True, **config}
    written = [name for name, is_on in flags.items() if name.startswith(_FLAG) and is_on]
    return [name.removeprefix(_FLAG) for name in written]


def _read(model_dir: Path, name: str, kind: type[T]) -> T:
    """Raises ValueError, which clients see: without the folder."""
    try:
        return msgspec.json.decode(read_checkpoint_file(model_dir / name), type=kind)
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from None
    except UNREADABLE as error:
        raise ValueError(f"cannot read {name}: {one_line(error)}") from None
