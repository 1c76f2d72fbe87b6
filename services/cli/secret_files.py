"""Options whose values are in files: HEARTH_<OPTION>_FILE names the file of HEARTH_<OPTION>.

So a secret is in no environment that others see, such as that of `docker inspect`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from shared.errors import ConfigError

_BEGIN, _END = "HEARTH_", "_FILE"


def read_secret_files(environ: MutableMapping[str, str]) -> None:
    """Replaces each HEARTH_<OPTION>_FILE by HEARTH_<OPTION> with the text of that file, without
    the line's end. An empty name is ignored. Raises ConfigError.
    """
    names = [each for each in environ if each.startswith(_BEGIN) and each.endswith(_END)]
    for name in names:
        path, option = environ.pop(name), name.removesuffix(_END)
        if not path:
            continue
        if environ.get(option):
            raise ConfigError(f"{option} and {name} are both set: one of them is enough")
        environ[option] = _read(name, Path(path))


def _read(name: str, path: Path) -> str:
    """Returns the text. Raises ConfigError."""
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} {path} is not text") from None
    if not text:
        raise ConfigError(f"{name} {path} is empty")
    return text
