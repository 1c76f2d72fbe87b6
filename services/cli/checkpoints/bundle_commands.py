"""`hearth compress` and `hearth decompress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.cluster.service_options import local_model
from services.cli.options import OPERATE

app = typer.Typer()
Threads = Annotated[
    int | None, typer.Option(min=1, help="Number of encoder threads (default: one per CPU).")
]


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth compress ~/models/tiny tiny-bundle  ·  "
    "hearth compress org/name bundle && hearth up --model bundle",
)
def compress(
    model: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint directory, or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output directory; must not exist.")],
    threads: Threads = None,
) -> None:
    """Compress a checkpoint without loss; `hearth up --model OUT` serves the result directly.

    Every tensor is decoded and compared. If interrupted, run the same command to continue.
    """
    from services.cli.checkpoints.compression_progress import ProgressDisplay, show_savings
    from shared.engine.codec.compress import compress_folder

    with ProgressDisplay() as display:
        manifest = compress_folder(local_model(model), out, display, num_threads=threads)
    show_savings(manifest, out)


@app.command(
    rich_help_panel=OPERATE, epilog="Example:  hearth decompress tiny-bundle ~/models/tiny-again"
)
def decompress(
    bundle: Annotated[Path, typer.Argument(metavar="OUT", help="Bundle, or its hub id.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint directory; must not exist.")
    ],
    threads: Threads = None,
) -> None:
    """Restore the original checkpoint of a bundle, byte by byte."""
    from services.cli.checkpoints.compression_progress import ProgressDisplay
    from shared.engine.codec.decompress import decompress_folder

    with ProgressDisplay() as display:
        decompress_folder(local_model(bundle), directory, display, num_threads=threads)
    print(f"{directory}: every file is identical to the original")
