"""Finds a model by its directory or by its id on the Hugging Face hub, `org/name`.

huggingface_hub downloads the files, with its cache, its progress bars and its variables (HF_HOME,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE), but only files that Hearth reads: no pickles, one format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.tokenizer.checkpoint_folder import FILE_SUFFIXES

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Folders of which files are read, and how the names of these end.
FOLDERS = {"additional_chat_templates": "a", "1_Pooling": "n"}  # .jinja, .json
TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "README.md")
WEIGHT_FILES = ("*.safetensors",)
MAX_REASON_CHARS = 300
NAMING_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")  # they become names in the cache


def _other_folders() -> Iterator[str]:
    """Yields the patterns of what is in other folders than FOLDERS, by where their names differ."""
    for start in sorted({name[:at] for name in FOLDERS for at in range(len(name))}):
        following = "".join(name[len(start)] for name in FOLDERS if name.startswith(start))
        yield f"{start}/*"
        yield f"{start}[!{following}]*/*"
    for name, end in FOLDERS.items():
        yield f"{name}[!/]*"
        yield f"{name}/*[!{end}]"


# Other formats of the same weights, and examples.
NOT_OURS = ("consolidated*", *_other_folders())


def is_hub_id(model: Path) -> bool:
    """Whether `model` has the form `org/name`. What exists here takes precedence, and so do files
    of weights.
    """
    is_id = _ID.fullmatch(str(model)) is not None and model.suffix not in FILE_SUFFIXES
    return is_id and not model.exists()


def local_copy(model: Path, *, needs_weights: bool = True) -> Path:
    """Returns the directory of a local or hub model; downloads a hub model that is not cached.

    Returns any other path unchanged. Raises ConfigError with one line that includes the remedy.
    """
    model = model.expanduser()
    if not is_hub_id(model):
        return model
    found = _fetched(str(model), (*TEXT_FILES, *(WEIGHT_FILES if needs_weights else ())))
    if not (found / "config.json").is_file():
        raise ConfigError(f"{model}: no config.json in {found}: expected a language model")
    if needs_weights and not any(found.glob("*.safetensors")):
        raise ConfigError(
            f"{model}: no *.safetensors in {found}: GGUF and pickles (*.bin) are not served"
        )
    return found


def _fetched(model_id: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    what = f"model {model_id!r} is not a directory here"
    try:
        _guard_session()
        found = snapshot_download(
            model_id, allow_patterns=list(patterns), ignore_patterns=list(NOT_OURS)
        )
    except errors.HFValidationError:
        raise ConfigError(f"{what}, and not a valid id on {hub}") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"model {model_id!r} is gated: accept its terms at {hub}/{model_id}, then set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{what}, and {hub} has no accessible model of that name: check the id, "
            "or set HF_TOKEN if it is private"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise ConfigError(f"{what}, not in {cache}, and {_why_offline(hub, error)}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    # HTTP clients, decoders and native code raise it: nobody lists them all
    except BaseException as error:
        raise ConfigError(f"{what}, and the download from {hub} failed: {_line(error)}") from None
    return Path(found)


def _guard_session() -> None:
    """Adds hooks to huggingface_hub's session that limit waits and check the names in answers.

    The library limits the waits for files alone, not for answers about a model, and takes the
    commit and the ETag of an answer for names of files, wherever they lead.
    """
    from huggingface_hub.utils import get_session

    hooks = getattr(get_session(), "event_hooks", None)  # None in older releases, on requests
    if hooks is not None and _check_names not in hooks["response"]:
        session: Any = get_session()
        session.event_hooks = {
            "request": [*hooks["request"], _limit_wait],
            "response": [*hooks["response"], _check_names],
        }


def _limit_wait(request: Any) -> None:
    from huggingface_hub import constants

    waits = request.extensions.get("timeout") or {}
    given = {each: wait for each, wait in waits.items() if wait is not None}
    wait_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    default = dict.fromkeys(("connect", "read", "write", "pool"), wait_s)
    request.extensions["timeout"] = {**default, **given}


def _check_names(response: Any) -> None:
    """Checks an answer about a file or a model. Raises ValueError if its names lead elsewhere."""
    request = response.request
    if request.method == "HEAD":
        for each in NAMING_HEADERS:
            _check_name(each, response.headers.get(each, "-").removeprefix("W/").strip('"'))
    elif "/api/" in request.url.path and response.is_success:
        response.read()
        try:
            body = response.json()
        except (ValueError, RecursionError):
            return  # huggingface_hub says what it expected
        if isinstance(body, dict) and isinstance(body.get("sha"), str):
            _check_name("commit", body["sha"])


def _check_name(what: str, name: str) -> None:
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise ValueError(f"the hub's {what} {name[:64]!r} cannot be the name of a file")


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:MAX_REASON_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _why_offline(hub: str, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE prevents the download: unset it, or give a checkpoint directory"
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return f"{hub} cannot be reached ({reason}): connect, or give a checkpoint directory"
