"""The loops over all workers in a placement decision, compiled: a few µs for a thousand workers.

Until `load` has compiled them, or loaded them from numba's cache, they run as Python, with the same
results: a few workers take 0.1 ms, and no start waits for numba. The arguments are named tuples,
which numba accepts.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The indices of a table's columns: floats, then codes.
BLOCK_SIZE, FREE_TOKENS, TOTAL_TOKENS, LOAD_S, STEP_S = range(5)
BUSY_UNTIL, CLOSED_UNTIL, TOKEN_S, LOCAL_TOKEN_S, PUSH_TOKEN_S, CONTEXT_TOKENS = range(5, 11)
PUSH_FREE_AT = 11  # when the link to another site has sent what was assigned to it
PROMPT_ROOM = 12  # free tokens where answers hold blocks, too; else infinite: prefill passes on
NUM_FLOATS, NUM_CODES = 13, 4
FORMAT, REGION, NAME, NUMERICS = range(NUM_CODES)  # FORMAT: equal for workers that may share KV

CLOSED_S = 1e6  # added to the cost of workers with enough work, to rank others first
FULL_S = 10.0  # added where a prompt waits for blocks that running answers hold
MAX_FORMATS = 4  # formats per model; with more, a kind of decode worker may be computed twice


class WorkerColumns(NamedTuple):
    """The columns of all workers. The first `size` rows are in use."""

    floats: NDArray[np.float64]  # [NUM_FLOATS, rows]
    codes: NDArray[np.uint64]  # [NUM_CODES, rows]
    size: int


class RoleWorkers(NamedTuple):
    """The workers of one role, with their cached tokens of one request."""

    columns: WorkerColumns
    holders: NDArray[np.int64]  # rows with a cached prefix
    held_tokens: NDArray[np.float64]  # tokens of the prompt, by holder
    is_allowed: NDArray[np.bool_]  # one flag a row; empty: all rows


class RequestTerms(NamedTuple):
    """The request's terms of the cost, in tokens and seconds."""

    num_tokens_to_compute: float  # tokens to compute before the last
    num_tokens: float
    num_context_tokens: float  # tokens of the longest choice at its end
    free_local_tokens: float
    max_local_tokens: float
    handoff_overhead_s: float
    now: float


# Source of a child process that fills numba's cache: compiling would block other threads.
FILL_CACHE = f"import os; os.nice(19); from {__name__} import load; load()"
DIGEST_FILE = "cost_kernel.digest"  # in the cache: the digest of the source that was compiled


class _Loops(NamedTuple):
    costs_of_decodes: Callable[..., Any]
    nearest_prefills: Callable[..., Any]


def is_cached() -> bool:
    """Whether numba's cache beside this file holds the machine code of this source. A false no
    costs a child process, a false yes pauses the event loop while numba compiles.
    """
    folder = Path(__file__).parent / "__pycache__"
    try:
        is_current = (folder / DIGEST_FILE).read_text() == _digest()
    except (OSError, UnicodeDecodeError):
        return False
    return is_current and all(
        any(folder.glob(f"cost_kernel.{loop.__name__}-{loop.__code__.co_firstlineno}.*.nbi"))
        for loop in (_costs_of_decodes, _nearest_prefills)
    )


def load() -> None:
    """Compiles the loops of this module to machine code. A second call does nothing.

    May run on a thread while another one takes decisions: all loops are replaced at once.
    """
    from numba import njit
    from numba.core.registry import CPUDispatcher
    from numba.extending import register_jitable

    global _loops
    if isinstance(_loops.costs_of_decodes, CPUDispatcher):
        return
    for callee in (_uncached, _least, _nearest):
        register_jitable(callee)

    def compiled(function: Any) -> Any:
        try:
            return njit(cache=True)(function)
        except RuntimeError:  # no writable cache folder
            return njit(function)

    loops = _Loops(compiled(_costs_of_decodes), compiled(_nearest_prefills))
    folder = loops.costs_of_decodes.stats.cache_path  # type: ignore[attr-defined]
    with _alone(folder):
        try:
            _compile(loops)
        except AttributeError:  # the cache's index names classes of an older source
            _forget(folder)
            _compile(loops)
        _write_digest(folder)
    _loops = loops


def _uncached(side: RoleWorkers, terms: RequestTerms) -> Any:
    uncached = np.full(side.columns.size, terms.num_tokens_to_compute)
    for holder in range(len(side.holders)):
        uncached[side.holders[holder]] -= side.held_tokens[holder]
    return uncached


def nearest_prefills(
    prefills: RoleWorkers,
    terms: RequestTerms,
    format_code: int,
    num_missing_tokens: float,
    first_row: int,
    num: int,
) -> Any:
    """Returns the `num` best prefill workers for a decode worker that lacks `num_missing_tokens`.

    Returns rows and seconds, best first, padded with -1 and infinity. Workers of equal cost come in
    row order, starting at `first_row` and wrapping around.
    """
    return _loops.nearest_prefills(prefills, terms, format_code, num_missing_tokens, first_row, num)


def _nearest_prefills(
    prefills: RoleWorkers,
    terms: RequestTerms,
    format_code: int,
    num_missing_tokens: float,
    first_row: int,
    num: int,
) -> Any:
    uncached = _uncached(prefills, terms)
    return _nearest(prefills, uncached, terms, format_code, num_missing_tokens, first_row, num)


def _nearest(
    prefills: RoleWorkers,
    uncached: NDArray[np.float64],
    terms: RequestTerms,
    format_code: int,
    num_missing_tokens: float,
    first_row: int,
    num: int,
) -> Any:
    floats, codes, size = prefills.columns
    now = terms.now
    rows, seconds = np.full(num, -1), np.full(num, inf)
    for number in range(size):
        row = (first_row + number) % size
        fits = floats[TOTAL_TOKENS, row] > terms.num_tokens and codes[FORMAT, row] == format_code
        if not fits or (len(prefills.is_allowed) and not prefills.is_allowed[row]):
            continue
        # computing and pushing overlap: the slower one counts
        queued_s = max(floats[BUSY_UNTIL, row] - now, 0.0)
        computed_s = queued_s + uncached[row] * floats[TOKEN_S, row]
        pushed_s = max(queued_s, floats[PUSH_FREE_AT, row] - now)
        pushed_s += num_missing_tokens * floats[PUSH_TOKEN_S, row]
        each_s = floats[STEP_S, row] + max(computed_s, pushed_s)
        if floats[PROMPT_ROOM, row] < uncached[row]:
            each_s += FULL_S
        if floats[CLOSED_UNTIL, row] > now:
            each_s += CLOSED_S
        place = num
        while place > 0 and each_s < seconds[place - 1]:
            place -= 1
        if place < num:
            for after in range(num - 1, place, -1):  # a slice takes seconds to compile
                seconds[after], rows[after] = seconds[after - 1], rows[after - 1]
            seconds[place], rows[place] = each_s, row
    return rows, seconds


def costs_of_decodes(
    decodes: RoleWorkers, prefills: RoleWorkers, terms: RequestTerms, excluded: NDArray[np.int64]
) -> Any:
    """Returns the seconds by row, infinite if the request cannot start there now; by row, whether
    with a handoff; the first row of the least cost; and the number of rows with that cost.
    """
    return _loops.costs_of_decodes(decodes, prefills, terms, excluded)


def _costs_of_decodes(
    decodes: RoleWorkers, prefills: RoleWorkers, terms: RequestTerms, excluded: NDArray[np.int64]
) -> Any:
    floats, codes, size = decodes.columns
    uncached, now = _uncached(decodes, terms), terms.now
    cost, is_remote = np.full(size, inf), np.full(size, False)
    # Caches the best handoffs for each kind (KV format, number of missing tokens): kinds are few.
    max_kinds = MAX_FORMATS * (len(decodes.holders) + 1)
    formats, missing_tokens = np.zeros(max_kinds, dtype=np.uint64), np.full(max_kinds, -1.0)
    nearest, nearest_s = np.full((max_kinds, 2), -1), np.full((max_kinds, 2), inf)
    prefill_uncached = _uncached(prefills, terms)
    kind = num_kinds = 0
    for row in range(size):
        step_s = floats[STEP_S, row]
        best_s = max(floats[BUSY_UNTIL, row] - now, 0.0) + step_s
        best_s += uncached[row] * floats[LOCAL_TOKEN_S, row]
        is_open = floats[CLOSED_UNTIL, row] <= now
        if prefills.columns.size and uncached[row] > terms.free_local_tokens:
            format_code, num_missing_tokens = codes[FORMAT, row], uncached[row]
            if missing_tokens[kind] != num_missing_tokens or formats[kind] != format_code:
                kind = 0
                while kind < num_kinds and (
                    missing_tokens[kind] != num_missing_tokens or formats[kind] != format_code
                ):
                    kind += 1
            if kind == num_kinds:
                kind = min(num_kinds, max_kinds - 1)
                num_kinds = kind + 1
                formats[kind], missing_tokens[kind] = format_code, num_missing_tokens
                rows, seconds = _nearest(
                    prefills, prefill_uncached, terms, format_code, num_missing_tokens, 0, 2
                )
                for place in range(2):
                    nearest[kind, place], nearest_s[kind, place] = rows[place], seconds[place]
            first = nearest[kind, 0]
            # a worker does not push to itself
            is_same_process = first >= 0 and prefills.columns.codes[NAME, first] == codes[NAME, row]
            each_s = nearest_s[kind, 1 if is_same_process else 0]
            each_s += terms.handoff_overhead_s + step_s  # the last token takes another step
            has_time = each_s < CLOSED_S
            if not has_time:
                each_s -= CLOSED_S
            if each_s < best_s or (uncached[row] > terms.max_local_tokens and each_s < inf):
                best_s, is_open, is_remote[row] = each_s, has_time, True
        is_allowed = not len(decodes.is_allowed) or decodes.is_allowed[row]
        free_tokens = floats[FREE_TOKENS, row]
        # choices together may exceed the cache: then they take turns, in a cache of their own
        has_room = free_tokens > terms.num_tokens or free_tokens >= floats[TOTAL_TOKENS, row]
        has_context = floats[CONTEXT_TOKENS, row] >= terms.num_context_tokens
        if is_open and is_allowed and has_room and has_context:
            cost[row] = best_s + floats[LOAD_S, row]
    for row in excluded:
        cost[row] = inf
    first, num_equal = _least(cost)
    return cost, is_remote, first, num_equal


def _least(cost: NDArray[np.float64]) -> Any:
    first, num_equal = 0, 0
    for row in range(len(cost)):
        if cost[row] < cost[first]:
            first, num_equal = row, 0
        num_equal += cost[row] == cost[first]
    return first, num_equal


_loops = _Loops(_costs_of_decodes, _nearest_prefills)


@contextmanager
def _alone(folder: str | None) -> Iterator[None]:
    """Lets one of several processes that start at once compile; the others load its code.

    numba's cache supports one writer: two writers could refer to each other's code in the index,
    and a concurrent reader could load code of an older source. The kernel frees the lock of a
    process that dies.
    """
    if folder is None:
        yield
        return
    with Path(folder, "scan.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest() -> str:
    """Returns the digest of all that the machine code depends on, except for the CPU. It leaves out
    the time of the file, which a checkout changes without changing the file.
    """
    versions = f"{sys.version} {version('numba')}"
    return blake2b(Path(__file__).read_bytes() + versions.encode(), digest_size=16).hexdigest()


def _write_digest(folder: str | None) -> None:
    if folder is not None:
        with suppress(OSError):
            Path(folder, DIGEST_FILE).write_text(_digest())


def _forget(folder: str) -> None:
    for path in Path(folder).glob("cost_kernel.*.nbi"):
        path.unlink()


def _compile(loops: _Loops) -> None:
    floats, codes = np.zeros((NUM_FLOATS, 1)), np.zeros((NUM_CODES, 1), dtype=np.uint64)
    columns = WorkerColumns(floats, codes, 0)
    empty = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.bool_)
    side, terms = RoleWorkers(columns, *empty), RequestTerms(*[0.0] * len(RequestTerms._fields))
    loops.costs_of_decodes(side, side, terms, empty[0])
    loops.nearest_prefills(side, terms, np.uint64(0), 0.0, 0, 1)
