"""`hearth quantize`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.cluster.service_options import local_model
from services.cli.options import OPERATE
from shared.errors import ConfigError

app = typer.Typer()


class Format(StrEnum):
    INT4 = "int4"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


@app.command(
    rich_help_panel=OPERATE,
    epilog="Example:  hearth quantize --format int4 --group 32 ~/models/tiny tiny-int4 && "
    "hearth up --model tiny-int4",
)
def quantize(
    model: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint directory, or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output directory; must not exist.")],
    format: Annotated[
        Format,
        typer.Option(
            help="int4 of compressed-tensors, fp8 in blocks of 128 x 128, or mxfp4 of gpt-oss."
        ),
    ] = Format.INT4,
    group: Annotated[
        int, typer.Option(min=0, help="Columns that share a scale of int4; 0: all of a row.")
    ] = 32,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Zero points beside the scales of int4.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer that stays dense: its name, or re: and a pattern; repeatable."),
    ] = None,
) -> None:
    """Write a checkpoint with weights of four or eight bits, rounded to the nearest without data.

    The embedding, the output head and layers that choose experts stay as they are.
    """
    from services.cli.checkpoints.compression_progress import ProgressDisplay
    from shared.engine.quantize.quantize_folder import quantize_folder

    _check_patterns(ignore or ())
    with ProgressDisplay(resumes=False) as display:
        num_layers = quantize_folder(
            local_model(model),
            out,
            format.value,
            display,
            group=group,
            is_symmetric=not asymmetric,
            ignored=ignore or (),
        )
    layers = "tensors of experts" if format == Format.MXFP4 else "linear layers"
    print(f"{out}: {num_layers} {layers} are {format.value}")
    print(f"serve it: hearth up --model {out}")


def _check_patterns(names: Sequence[str]) -> None:
    """Raises ConfigError."""
    for each in names:
        try:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(f"--ignore {each!r} is no pattern: {error}") from None
