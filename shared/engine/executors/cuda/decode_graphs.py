"""CUDA graphs of decode steps: one launch instead of hundreds.

A graph is of a shape: a number of rows, a width of the block tables, and how tokens are drawn.
Steps of fewer rows are padded. Shapes of few rows are captured before a worker is ready, others of
short contexts in idle moments after it, and the rest once their second step comes; the first one,
and what no graph can do, runs eagerly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Protocol

import structlog
from torch import Tensor

from shared.background import item_error
from shared.clock import MonotonicClock
from shared.engine.executors.cuda.cuda_device import is_out_of_memory
from shared.engine.executors.cuda.decode_buffers import (
    Arrays,
    DecodeShape,
    arrays_in,
    fields_of,
    fill,
    num_bytes_of,
    step_inputs,
)
from shared.engine.executors.loading.kv_sizing import MemoryReport
from shared.engine.layers.attention_inputs import LayerKind
from shared.engine.models.device_step import DeviceStepInputs, DeviceStepOutput
from shared.engine.step import StepInputs
from shared.kv_layout import KvLayout

log = structlog.get_logger(__name__)

FIRST_ROWS = 8  # shapes of at most so many rows are captured before a worker is ready
MOST_IDLE_ROWS = 64  # limit of the numbers of rows whose shapes are captured in idle moments
SMALL_ROWS, ROWS_APART = (1, 2, 4, 8), 8
NUM_FIRST = 2 * (len(SMALL_ROWS) + 1)  # graphs before a worker is ready: the largest's, too
LEAST_TOKENS, GROWTH = 2048, 4  # widths of block tables, in tokens
# Limit of rows x tokens of a shape: attention of the exact mode keeps sums of each segment.
MAX_TOKENS = 1 << 22
# The free memory of an H200 fell by 0.14 GiB with eight graphs of a model of 32 layers.
GRAPH_BYTES = 18 << 20
GRAPH_SHARE = 0.02  # of the device's memory for all graphs; the least recently used one gives way
# Seconds after one gave way until a step captures again: a batch may change among more shapes than
# there is memory for, and each capture takes as long as several steps.
REPLACE_APART_S = 5.0

Step = Callable[[DeviceStepInputs], DeviceStepOutput]


class GraphDevice(Protocol):
    """The part of a device that graphs need."""

    def empty(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Returns buffers of the host [MOST_AHEAD, num_bytes], and one of the device."""
        ...

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copies from the host. `source` changes only once results of this step are read."""
        ...

    def download(self, values: Tensor) -> Tensor:
        """Returns memory of the host that has the values once the device has done its work until
        then.
        """
        ...

    def capture(
        self, call: partial[DeviceStepOutput]
    ) -> tuple[Callable[[], None], DeviceStepOutput]:
        """Returns a function that repeats the launches of `call`, and its output, which each
        repetition overwrites. Raises whatever `call` raises, and RuntimeError if something in it
        waits for the device.
        """
        ...


class DecodeGraphs:
    """The graphs of one model and KV cache. `step` computes a step eagerly."""

    def __init__(
        self,
        device: GraphDevice,
        step: Step,
        kv_layout: KvLayout,
        kinds: Sequence[LayerKind],
        kind_of_layer: Sequence[int],
        last_tokens: Tensor,
        counts: Sequence[Tensor],
        *,
        max_rows: int,
        max_tokens: int,
        has_experts: bool,
        max_graphs: int,
    ) -> None:
        """`max_tokens`: of one sequence. `max_graphs`: of `GRAPH_BYTES` each; the logits that one
        returns count besides. `last_tokens`: of a step with the most rows or more, as in
        `DeviceStepInputs`. `counts`: tensors to which each step adds.
        """
        self.num_replayed = self.num_eager = 0  # decode steps
        self.num_out_of_memory = 0  # captures
        self._device, self._step = device, step
        self._kinds, self._kind_of_layer = kinds, kind_of_layer
        self._last_tokens = last_tokens
        self._changed = (last_tokens, *counts)  # by a step
        self._num_groups, self._block_size = len(kv_layout.groups), kv_layout.block_size
        self._rows = row_counts(max_rows, is_padded=not has_experts)
        self._widths = table_widths(max_tokens, self._block_size)
        self._max_graphs = max_graphs
        # None: cannot be captured. The most recently used is the last.
        self._graphs: dict[DecodeShape, Graph | None] = {}
        self._seen: set[DecodeShape] = set()
        self._may_have_next = True
        self._clock = MonotonicClock()
        self._replaced_at = -math.inf  # when a graph gave way last

    @property
    def is_usable(self) -> bool:
        """False if each capture has failed."""
        return not self._graphs or any(self._graphs.values())

    def graph_of(self, inputs: StepInputs) -> Graph | None:
        """Returns None if the step must be computed eagerly."""
        shape = self.shape_of(inputs)
        graph = None if shape is None else self._graph_of(shape)
        self.num_replayed += graph is not None
        self.num_eager += shape is not None and graph is None
        return graph

    def shape_of(self, inputs: StepInputs) -> DecodeShape | None:
        """Returns None unless each row is one token that is sampled, and a graph can hold it."""
        num_rows, sampling = len(inputs.query_lens), inputs.sampling
        is_special = inputs.prompt_logprobs or inputs.pooling or inputs.embedded is not None
        if is_special or sampling.num_rows != num_rows:
            return None
        if len(inputs.input_ids) != num_rows or not num_rows or num_rows > self._rows[-1]:
            return None
        rows = self._rows[bisect_left(self._rows, num_rows)]
        num_blocks = -(-int(inputs.context_lens.max()) // self._block_size)
        place = bisect_left(self._widths, num_blocks)
        if place == len(self._widths):
            return None
        width = self._widths[place]
        if rows * width * self._block_size > MAX_TOKENS:
            return None
        return DecodeShape(rows, width, sampling.is_plain, sampling.is_plain_greedy)

    def capture_first(self) -> None:
        """Captures shapes of short contexts: of the most rows, then of few, the largest first. The
        memory that one graph leaves is used by smaller ones: in the reverse order each takes more.
        """
        for shape in self._first():
            self._capture(shape)

    def expect_first(self) -> None:
        """Instead of `capture_first` without a KV cache: their first steps capture them."""
        self._seen.update(self._first())

    def _first(self) -> Iterator[DecodeShape]:
        few = self._rows[: bisect_left(self._rows, FIRST_ROWS + 1)]
        tokens = self._widths[0] * self._block_size
        most = self._rows[: bisect_left(self._rows, MAX_TOKENS // tokens + 1)][-1]
        for rows in dict.fromkeys((most, *reversed(few))):
            for is_greedy in (False, True):
                yield DecodeShape(rows, self._widths[0], True, is_greedy)

    def has_next(self) -> bool:
        """Whether shapes are left of short contexts."""
        if self._may_have_next:  # asked after every step
            is_full = len(self._graphs) >= self._max_graphs or self._replaced_at > -math.inf
            self._may_have_next = not is_full and next(self._left(), None) is not None
        return self._may_have_next

    def capture_next(self) -> None:
        """Captures the smallest shape that is left of short contexts, or none."""
        shape = next(self._left(), None)
        if shape is not None:
            self._capture(shape)

    def _left(self) -> Iterator[DecodeShape]:
        for rows in self._rows[:MOST_IDLE_ROWS]:
            for is_greedy in (True, False):
                shape = DecodeShape(rows, self._widths[0], True, is_greedy)
                if shape not in self._graphs:
                    yield shape

    def clear(self) -> None:
        """Forgets all graphs: they have the addresses of a KV cache that is replaced. Their shapes
        have been seen: the next step of one captures it.
        """
        self._seen.update(shape for shape, graph in self._graphs.items() if graph is not None)
        self._graphs.clear()
        self._may_have_next, self._replaced_at = True, -math.inf

    def _graph_of(self, shape: DecodeShape) -> Graph | None:
        if shape not in self._graphs:
            is_new, now = shape not in self._seen, self._clock.now()
            if is_new or now < self._replaced_at + REPLACE_APART_S:
                self._seen.add(shape)
                return None
            self._capture(shape)
            if shape not in self._graphs:
                return None
        graph = self._graphs[shape] = self._graphs.pop(shape)
        return graph

    def _capture(self, shape: DecodeShape) -> None:
        if len(self._graphs) >= self._max_graphs:
            self._drop_oldest()
        began_at, self._graphs[shape] = self._clock.now(), None
        try:
            self._graphs[shape] = self._captured(shape)
        except BaseException as raised:  # also a compiler's: the step is then computed eagerly
            error = item_error(raised)
            reason = str(error).partition("\n")[0]
            log.warning("graph_not_captured", **shape._asdict(), reason=reason)
            if is_out_of_memory(error):
                self._try_later(shape)
        else:
            seconds = round(self._clock.now() - began_at, 3)
            log.debug("graph_captured", **shape._asdict(), seconds=seconds)
        while len(self._graphs) > 1 and self._num_bytes() > self._max_graphs * GRAPH_BYTES:
            self._drop_oldest()

    def _try_later(self, shape: DecodeShape) -> None:
        """Others may give memory back. Until then no further shape is captured in idle moments."""
        self.num_out_of_memory += 1
        del self._graphs[shape]
        self._replaced_at = self._clock.now()

    def _drop_oldest(self) -> None:
        del self._graphs[next(iter(self._graphs))]
        self._replaced_at = self._clock.now()

    def _num_bytes(self) -> int:
        return sum(0 if each is None else each.num_bytes for each in self._graphs.values())

    def _captured(self, shape: DecodeShape) -> Graph:
        fields = fields_of(shape, self._num_groups, self._kinds)
        hosts, device = self._device.empty(num_bytes_of(fields))
        turns = cycle([(host, _as_numpy(arrays_in(host, fields))) for host in hosts])

        def upload(step: StepInputs | None) -> None:
            host, arrays = next(turns)
            fill(arrays, step, self._kinds, len(self._last_tokens))
            self._device.upload(host, device)

        upload(None)
        kinds = self._kinds, self._kind_of_layer
        inputs = step_inputs(arrays_in(device, fields), shape, *kinds, self._last_tokens)
        with _restored(self._changed):  # its first call samples tokens of padding
            replay, output = self._device.capture(partial(self._step, inputs))
        return Graph(inputs, upload, replay, output)


class Graph:
    """A captured step. Its output is void once the next graph runs."""

    def __init__(
        self,
        inputs: DeviceStepInputs,
        upload: Callable[[StepInputs], None],
        replay: Callable[[], None],
        output: DeviceStepOutput,
    ) -> None:
        self._inputs = inputs  # a graph reads their memory, and does not keep it
        self._upload, self._replay, self._output = upload, replay, output
        logits_bytes = 0 if output.logits is None else output.logits.nbytes
        self.num_bytes = GRAPH_BYTES + logits_bytes

    def run(self, inputs: StepInputs) -> DeviceStepOutput:
        self._upload(inputs)
        self._replay()
        rows = len(inputs.input_ids)
        return DeviceStepOutput._make(
            None if each is None else each[:rows] for each in self._output
        )


@contextmanager
def _restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [each.clone() for each in tensors]
    try:
        yield
    finally:
        for each, values in zip(tensors, before, strict=True):
            each.copy_(values)


def _as_numpy(arrays: Mapping[str, Tensor]) -> Arrays:
    return {name: each.numpy() for name, each in arrays.items()}


def max_graphs_in(total_bytes: int) -> int:
    """Returns how many graphs a device of this memory holds."""
    return max(NUM_FIRST, int(total_bytes * GRAPH_SHARE) // GRAPH_BYTES)


def beside_graphs(report: MemoryReport) -> MemoryReport:
    """Returns the memory that is free beside as many graphs as there may be."""
    return replace(report, free=report.free - max_graphs_in(report.total) * GRAPH_BYTES)


def row_counts(max_rows: int, *, is_padded: bool) -> tuple[int, ...]:
    """Returns 1, 2, 4, 8, 16, 24, ..., `max_rows`: for more rows than that no kernel is compiled.
    Without padding all numbers: with experts, padding would be routed to some that are read for it,
    and be counted.
    """
    if not is_padded:
        return tuple(range(1, max_rows + 1))
    counts = (*SMALL_ROWS, *range(2 * ROWS_APART, max_rows, ROWS_APART))
    return (*counts[: bisect_left(counts, max_rows)], max_rows)


def table_widths(max_tokens: int, block_size: int) -> tuple[int, ...]:
    """Returns the widths of block tables, in blocks, up to the first that holds `max_tokens`."""
    tokens = [LEAST_TOKENS]
    while tokens[-1] < max_tokens:
        tokens.append(tokens[-1] * GROWTH)
    return tuple(-(-min(each, max_tokens) // block_size) for each in tokens)
