"""`hearth warm`: compiles a model's kernels before its first start, for images and CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import structlog
import typer

from services.cli.cluster.service_options import DEMO_MODEL_DIR, local_model
from services.cli.options import OPERATE
from shared.clock import MonotonicClock
from shared.telemetry.log import configure_child_logging

log = structlog.get_logger(__name__)
app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth warm  ·  hearth warm --model ~/models/tiny --dtype float32",
)
def warm(
    model: Annotated[
        Path, typer.Option(help="Checkpoint directory, or a hub id such as org/name.")
    ] = DEMO_MODEL_DIR,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32, as on the worker.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16 or fp8, as on the worker.")] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            envvar="HEARTH_WEIGHTS", help="Weight format in memory: auto, dense or compressed."
        ),
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    rows: Annotated[bool, typer.Option(help="Also compile the kernels for long prompts.")] = True,
) -> None:
    """Compile the CPU kernels of a model into the cache directory."""
    from shared.engine.executors.loading.warm import compile_model

    configure_child_logging("warm")  # `hearth up` starts it, too
    clock = MonotonicClock()
    started = clock.now()
    compile_model(
        local_model(model, needs_weights=False),
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
        block_size=block_size,
        has_rows=rows,
    )
    log.info("cpu_kernels_compiled", duration_s=round(clock.now() - started, 1))
