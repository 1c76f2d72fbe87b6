"""Compiles every launch class of every model family with the installed release of Triton.

    python -m tests.kernels.compiled.compile_table --write

records what they use beside this file, in a quarter of an hour of a core; `--resume` compiles only
those without a row.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import triton

from benchmarks.gpu_kit.dry.dry_device import dry_device
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.cuda.first_step import run_largest_step
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import set_mode
from shared.numerics import Mode
from tests.kernels.compiled.family_sizes import CASES, computer_of
from tests.kernels.compiled.launch_classes import LaunchClass, recording
from tests.kernels.compiled.tables import (
    FOLDER,
    README,
    Row,
    Table,
    readme,
    recorded,
    recorded_sources,
    store,
    store_sources,
)

FILE = FOLDER / f"triton-{triton.__version__}.json"
MODES: tuple[Mode, ...] = get_args(Mode)
DRAWN = "Llama 3.1 8B"  # also with every option of sampling
NUM_BLOCKS = 4096  # of the KV cache
MAX_BATCH_TOKENS = 8192
MAX_SEQUENCES = 256
# Other models decode up to 16 sequences: attention to more has the same loops, and a longer plan.
LARGE_BATCHES = ("DeepSeek V3", "Llama 3.1 8B")


@cache
def classes_of(case: str, mode: Mode) -> dict[str, LaunchClass]:
    """Key -> class: all that a worker's start compiles."""
    options = LoadOptions(
        mode=mode,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_sequences=MAX_SEQUENCES if case in LARGE_BATCHES else 16,
    )
    with tempfile.TemporaryDirectory() as folder, dry_device("cubin"), recording() as found:
        computer = computer_of(Path(folder), case)
        set_mode(computer.model, mode)
        compile_kernels(StepKernels(computer.model, computer.kv_layout, NUM_BLOCKS, options))
        if case == DRAWN:
            run_largest_step(computer, LoadOptions(mode=mode, max_batch_tokens=2))
    return found


def all_classes() -> dict[str, LaunchClass]:
    found: dict[str, LaunchClass] = {}
    for case in CASES:
        for mode in MODES:
            found |= classes_of(case, mode)
    return found


def by_kernel(classes: Iterable[LaunchClass]) -> dict[str, list[LaunchClass]]:
    """Sorted by name and key."""
    found = defaultdict(list)
    for each in sorted(classes, key=lambda each: (each.name, each.key)):
        found[each.name].append(each)
    return dict(found)


def compiled(classes: Iterable[LaunchClass]) -> Iterator[tuple[LaunchClass, Row]]:
    for each in classes:
        yield each, Row.of(each.compiled())


def write(*, is_resumed: bool) -> None:
    """A case after the other, so that a run that was ended can be resumed: rows that are recorded
    then stay, with the source that they were recorded from.
    """
    table: Table = recorded(FILE) if is_resumed else {}
    sources = {name: recorded_sources(FILE).get(name, "") for name in table}
    found: dict[str, LaunchClass] = {}
    for case in CASES:
        for mode in MODES:
            classes = classes_of(case, mode)
            found |= classes
            new = [each for each in classes.values() if each.key not in table.get(each.name, {})]
            for each, row in compiled(new):
                table.setdefault(each.name, {})[each.key] = row
                sources.setdefault(each.name, each.source)
        store(table, FILE)
        store_sources(sources, FILE)
        print(f"{case}: {len(found)} classes, {time.process_time():.0f} s", flush=True)
    store(_of_classes(table, found.values()), FILE)
    README.write_text(readme())


def _of_classes(table: Table, classes: Iterable[LaunchClass]) -> Table:
    """Without rows of classes that nothing launches any more."""
    return {
        name: {each.key: table[name][each.key] for each in of_kernel}
        for name, of_kernel in by_kernel(classes).items()
    }


if __name__ == "__main__":
    if sys.argv[1:] in (["--write"], ["--resume"]):
        write(is_resumed=sys.argv[1:] == ["--resume"])
