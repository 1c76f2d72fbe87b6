"""The progress of a training run on the console."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 20  # steps between two lines of output without a terminal


@dataclass
class Step:
    """One step of the training, which reports its loss back to the progress bar."""

    number: int
    loss: float = math.nan


def progress_bar(steps: int) -> Iterator[Step]:
    """Yields the steps while drawing a bar; without a terminal, prints a line every LINE_EVERY."""
    console = Console()
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=40),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    average, start = math.nan, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, loss=average)
        for number in range(steps):
            step = Step(number)
            yield step
            average = step.loss if math.isnan(average) else 0.97 * average + 0.03 * step.loss
            progress.update(task, advance=1, loss=average)
            done = number + 1
            if not console.is_terminal and (done % LINE_EVERY == 0 or done == steps):
                seconds = time.monotonic() - start
                print(f"step {done}/{steps}  loss {average:.4f}  {seconds:.0f} s", flush=True)
