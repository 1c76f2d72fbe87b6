"""A command line for a configuration Struct: an option and an environment variable per field."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer

import shared
from services.cli.cluster.option_texts import HELP, PANEL_OF, VALUES
from services.cli.options import among, size_option
from services.local.credentials import process_id_for
from services.local.hub_download import is_hub_id, local_copy
from shared.config import EncodeConfig, ProcessConfig, RankConfig, check
from shared.secrets.option_files import OptionFile

DEMO_MODEL_DIR = Path(shared.__file__).parent / "demo_model"
DEMO_VISION_DIR = DEMO_MODEL_DIR.with_name("demo_vision_model")
WITH_WEIGHTS = (EncodeConfig, RankConfig)
DEMO_MODEL_NAME = "hearth-demo"
# Models that come with Hearth.
DEMO_MODELS = {DEMO_MODEL_NAME: DEMO_MODEL_DIR, "hearth-demo-vision": DEMO_VISION_DIR}

REPEATABLE = {
    *("budget", "cors_origin", "image_host", "kv_networks", "linked_site", "region_classes"),
}
_OPTION_TYPES: dict[str, Any] = {
    "process_id": str | None,
    **dict.fromkeys(REPEATABLE, list[str]),
}
_SHOWN_DEFAULTS: dict[str, bool | str] = {"process_id": False, "model_dir": "the demo model"}
_METAVARS = {
    "gpu_memory": "SIZE|SHARE",
    "linked_site": "SITE[=WEIGHT]",
    "region_classes": "CLASS",
}
_FILE_ENDINGS = ("_ca", "_cert", "_key")
_DEFAULTS = {"model_dir": DEMO_MODEL_DIR, "process_id": None}

_CONTEXT = inspect.Parameter(
    "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)

C = TypeVar("C", bound=ProcessConfig)


class DecodeRole(StrEnum):
    """The values of `--role` of `hearth decode`."""

    own = "own"
    both = "both"


class PrefillRole(StrEnum):
    """The values of `--role` of `hearth prefill`."""

    own = "own"
    both = "both"
    with_encode = "encode"  # `encode` is a method of texts


_ROLE_HELP = {
    DecodeRole: "own: decode only; both: prefill and decode over one engine.",
    PrefillRole: "own: prefill only; both: prefill and decode over one engine; encode: prefill, "
    "and images of other workers.",
}


def service_command(
    config_type: type[C],
    role: str,
    run: Callable[..., int],
    *,
    role_type: type[StrEnum] | None = None,
) -> Callable[..., None]:
    """Returns a typer command that builds a `config_type`, checks all its fields and
    calls `run(config)`.

    With `role_type` it has an option of this type, and calls `run(config, role)`. The process exits
    with the status that `run` returns.
    """

    def command(context: typer.Context, **options: Any) -> None:
        arguments = () if role_type is None else (str(options.pop("role")),)
        options["process_id"] = process_id_for(
            role,
            options["nats_url"],
            credential=options["process_id"],
            instance=options.pop("instance"),
        )
        if "model_dir" in options:
            is_worker = issubclass(config_type, WITH_WEIGHTS)
            needs_weights = is_worker and options.get("load_format") != "dummy"
            options |= _model(
                str(options["model_dir"]), options["model_name"], needs_weights=needs_weights
            )
        for name in REPEATABLE & options.keys():
            options[name] = tuple(options[name] or ())
        config = config_type(**options, option_files=_files_of(options, context.obj or {}))
        check(config)
        _leave(run(config, *arguments))

    found = msgspec.structs.fields(config_type)
    fields = tuple(each for each in found if each.name != "option_files")
    if issubclass(config_type, RankConfig):  # the worker of the ranks has them
        fields = tuple(each for each in fields if not each.name.startswith("metrics_"))
    parameters = [_CONTEXT, *map(_parameter, fields)]
    parameters.append(_instance_parameter())
    if role_type is not None:
        parameters.append(_role_parameter(role_type))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _files_of(
    options: Mapping[str, Any], files: Mapping[str, OptionFile]
) -> Mapping[str, OptionFile]:
    """Returns the files whose values are used: the command line goes before them."""
    return {name: each for name, each in files.items() if options.get(name) == each.text}


def _model(given: str, name: str, *, needs_weights: bool) -> dict[str, Any]:
    """Resolves a model: `given` is a directory, a hub id, or empty for no model, which only a
    gateway may have.
    """
    if not given:
        return {"model_dir": None, "model_name": name}
    return {
        "model_dir": local_model(Path(given), needs_weights=needs_weights),
        "model_name": model_name_for(Path(given), name),
    }


def demo_folder(model: Path) -> Path | None:
    """Returns the folder of a model that comes with Hearth, by its name, unless a file has it."""
    return None if model.exists() else DEMO_MODELS.get(str(model))


def local_model(model: Path, *, needs_weights: bool = True) -> Path:
    """Returns the directory of a model, also of one that comes with Hearth, by its name. Raises
    ConfigError as `local_copy`.
    """
    return demo_folder(model) or local_copy(model, needs_weights=needs_weights)


def model_name_for(model_dir: Path, name: str) -> str:
    """Returns `name`, else a hub model's id, else a demo model's fixed name, else "" (for the
    directory's name).
    """
    if name:
        return name
    if is_hub_id(model_dir):
        return str(model_dir)
    own = (demo_folder(model_dir) or model_dir).resolve()
    return next((name for name, each in DEMO_MODELS.items() if each.resolve() == own), "")


def _leave(status: int) -> NoReturn:
    """Exits at once, as all is closed: the teardown of torch's modules would take a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parameter(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    name = field.name
    option_type = _OPTION_TYPES.get(name, field.type)
    if name == "model_dir" and not field.required:
        option_type = str  # a Path would make the current directory of an empty text
    settings: dict[str, Any] = {
        "help": HELP.get(name, ""),
        "envvar": f"HEARTH_{name.removeprefix('is_').upper()}",
        "rich_help_panel": PANEL_OF.get(name),
    }
    if name in VALUES:
        settings["autocompletion"] = among(*VALUES[name])
    option = typer.Option(
        _flag(name, is_switch=field.type is bool),
        metavar=_metavar(name, field.type),
        show_default=_SHOWN_DEFAULTS.get(name, True),
        **settings,
    )
    if name.endswith("_bytes"):
        option = size_option(default=None if field.required else field.default, **settings)
    default = _DEFAULTS.get(name, inspect.Parameter.empty if field.required else field.default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[option_type, option],
    )


def _metavar(name: str, kind: Any) -> str | None:
    """Returns what stands for the value in the help; None: by its type."""
    if name.endswith(_FILE_ENDINGS):
        return "FILE"
    if name.endswith("_url"):
        return "URL"
    if name in _METAVARS:
        return _METAVARS[name]
    return "NAME" if name in VALUES and kind is str else None


def _flag(name: str, *, is_switch: bool) -> str:
    words = name.removeprefix("is_").replace("_", "-")
    return f"--{words}/--no-{words}" if is_switch else f"--{words}"


def _instance_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--instance",
        help="This process among those of its credential (default: 6 random hex digits); - is the "
        "only one.",
        envvar="HEARTH_INSTANCE",
        show_default=False,
        rich_help_panel=PANEL_OF["instance"],
    )
    return inspect.Parameter(
        "instance",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _role_parameter(role_type: type[StrEnum]) -> inspect.Parameter:
    option = typer.Option(
        "--role",
        help=_ROLE_HELP[role_type],
        rich_help_panel=PANEL_OF["role"],
    )
    return inspect.Parameter(
        "role",
        inspect.Parameter.KEYWORD_ONLY,
        default=role_type("own"),
        annotation=Annotated[role_type, option],
    )
