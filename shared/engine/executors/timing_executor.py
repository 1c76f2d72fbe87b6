"""An executor without a model: tokens from a formula, time from a cost model. Torch-free.

For the simulation and for control-plane benchmarks. With several steps in flight, encoded plans
drive it as they drive ranks: it is a device that computes queued steps in order, or a pipeline,
whose stages together hold as many steps.

Its KV is real: the 16 bytes of a token are a digest of the token, its position and *the KV before
it*, read from the paged cache; and the next token depends only on the last KV. So KV that is lost,
misplaced, stale or of another sequence yields other tokens, exactly as with a model.

Its distribution is 1/2, 1/4, 1/8, … over consecutive tokens from a first one, modulo the
vocabulary; the first depends on the state, and for sampling also on noise, bias and penalties.
Under a token mask it is over consecutive allowed tokens, the special ones included.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shared.background import start_awaited
from shared.clock import Clock
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.executor import RecordedSteps, StepLaunch
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.rank_state import RankState
from shared.engine.planning.step_work import ModelWorkload
from shared.engine.sampling.mask_words import Words, allowed_tokens, join_masks, without_banned
from shared.engine.step import KvRun, SamplingInputs, StepInputs, StepOutput, TokenMask
from shared.engine.step_plan import StepPlan, StepResult, decode_plan, decode_result, encode
from shared.errors import InvalidRequest
from shared.kv_layout import KvGroup, KvLayout, PagedKv, Reach, first_seen
from shared.kv_wire.link import PageLock
from shared.messages import DevicePeaks, TokenLogprobs
from shared.numerics import KERNELS_VERSION, Mode, Numerics

STATE_BYTES = 16
FIRST_TOKEN_ID = 16  # special tokens are below it: the formula never samples them


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: a base per step, a cost per computed token and per token of context read."""

    base_s: float = 0.005
    per_token_s: float = 20e-6
    per_context_token_s: float = 10e-9

    def of(self, inputs: StepInputs) -> float:
        num_context = int(inputs.context_lens.sum())
        num_tokens = len(inputs.input_ids)
        return self.base_s + num_tokens * self.per_token_s + num_context * self.per_context_token_s


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    plan: StepPlan
    rows: list[ScheduledSequence]
    answer: asyncio.Task[bytes]


class TimingExecutor:
    """An `Executor`, and the `KvMemory` of the whole cache."""

    has_ended = False
    step_launch: StepLaunch = ""
    gpu_uuid = ""
    num_out_of_memory = 0
    is_elastic = True
    step_extension_s = 0.0
    offloaded_bytes = 0
    eos_token_ids: tuple[int, ...] = ()
    has_head = True
    revision = "timing"
    work = ModelWorkload()  # it has no weights
    peaks: DevicePeaks | None = None
    page_lock: PageLock | None = None

    def __init__(
        self,
        clock: Clock,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_context_tokens: int = 8192,
        vocab_size: int = 32_000,
        cost: StepCost | None = None,
        mode: Mode = "exact",
        variant: int = 0,
        reaches: tuple[Reach, ...] = (None,),
        max_blocks: int | None = None,
        depth: int = 1,
        num_stages: int = 1,
    ) -> None:
        """Creates a model without weights. `max_blocks` is `num_blocks` by default. Executors with
        another `variant` compute other bits, as on another kind of device. The model has one layer
        for each of `reaches`, in a group of its own.
        """
        self.depth = depth
        self.num_stages = num_stages
        self.step_budget_s = 0.0
        states = [PagedKv(1, STATE_BYTES // 2, "uint8", reach) for reach in reaches]
        groups = tuple(KvGroup((layer,), state) for layer, state in enumerate(states))
        self.kv_layout = KvLayout(groups, block_size, hash_tokens=block_size)
        device = f"timing-{variant}" if variant else "timing"
        self.numerics = Numerics(mode, device, self.kv_layout.dtype, str(KERNELS_VERSION))
        self.num_blocks = num_blocks
        self.max_blocks = num_blocks if max_blocks is None else max_blocks
        self.max_context_tokens = max_context_tokens
        self.vocab_size = vocab_size
        self._reaches = reaches
        self._salt = variant.to_bytes(8, "little")
        self._clock = clock
        self._cost = StepCost() if cost is None else cost
        self._kv = np.zeros((self.max_blocks * block_size, STATE_BYTES), dtype=np.uint8)
        self._states = self._kv.data.cast("B")  # a flat view
        self._plans = PlanBuilder(feeds_sampled=num_stages > 1)
        self._state = RankState(block_size, len(groups))
        self._runs_ahead = depth > 1  # at depth 1 a step starts when its result is awaited
        self._inputs: StepInputs | None = None  # inputs of a step in flight that has not started
        self._steps: dict[int, _QueuedStep] = {}  # steps in flight, by number
        self._last: asyncio.Task[bytes] | None = None

    def submit(self, rows: list[ScheduledSequence]) -> int:
        if self._num_in_flight >= self.depth:
            raise ValueError(f"{self.depth} steps are in flight, no more may be")
        plan, masks = self._plans.build(rows)
        try:
            if not self._runs_ahead:
                self._inputs = self._inputs_of(plan, masks)
            else:
                answer = self._answer(encode(plan), masks, self._last)
                self._last = start_awaited(answer, Exception)  # `result` raises what the step did
                self._steps[plan.step] = _QueuedStep(plan, rows, self._last)
        except BaseException:
            self._plans.take_back(plan, rows)
            raise
        return plan.step

    async def result(self, step: int) -> StepOutput:
        if not self._runs_ahead:
            inputs, self._inputs = self._inputs, None
            assert inputs is not None, "no step is in flight"
            return await self._computed(inputs)
        queued = self._steps[step]
        await asyncio.wait((queued.answer,))
        del self._steps[step]
        if step >= self._state.next_step:  # the plan, or one before it, could not be applied
            self._plans.take_back(queued.plan, queued.rows)
        return decode_result(queued.answer.result()).output

    @property
    def _num_in_flight(self) -> int:
        return len(self._steps) + (self._inputs is not None)

    async def _answer(
        self, payload: bytes, masks: Sequence[TokenMask], previous: asyncio.Task[bytes] | None
    ) -> bytes:
        """Returns the result of a plan, once the step before it is computed."""
        if previous is not None:
            await asyncio.wait((previous,))
        plan = decode_plan(payload)
        output = await self._computed(self._inputs_of(plan, masks))
        return encode(StepResult(plan.step, output))

    def _inputs_of(self, plan: StepPlan, masks: Sequence[TokenMask]) -> StepInputs:
        inputs = self._state.apply(plan, masks)
        self.step_budget_s = 10 * self._cost.of(inputs)
        return inputs

    async def _computed(self, inputs: StepInputs) -> StepOutput:
        output = await self.run(inputs)
        self._state.record(output)
        return output

    async def run(self, inputs: StepInputs) -> StepOutput:
        """Computes a step."""
        await self._clock.sleep(self._cost.of(inputs))
        self._copy_blocks(inputs.block_copies)
        first = 0
        chunks: list[list[bytes]] = []
        for row, query_len in enumerate(inputs.query_lens.tolist()):
            rows = slice(first, first + query_len)
            tokens = inputs.input_ids[rows], inputs.positions[rows]
            of_groups = [
                self._compute(inputs.block_tables[group, row].tolist(), *tokens, reach)
                for group, reach in enumerate(self._reaches)
            ]
            chunks.append([_joined(states) for states in zip(*of_groups, strict=True)])
            first += query_len
        states = list(chain.from_iterable(chunks))
        token_ids, logprobs, late_rows = self._sample(states, inputs)
        return StepOutput(
            token_ids,
            logprobs,
            self._prompt_logprobs(chunks, inputs),
            _pooled(chunks, inputs),
            late_rows,
        )

    async def check(self) -> None:
        await self._clock.sleep(self._cost.base_s)

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        """One layer of one head: every shard is all of them."""
        states = self._kv[self._slots(run.block_table, run.first_token, run.num_tokens)]
        # [tokens, 16] to the wire's [layers=1, 2, tokens, heads=1, head_dim=8]
        out[:] = states.reshape(run.num_tokens, 2, STATE_BYTES // 2).transpose(1, 0, 2).tobytes()

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        halves = np.frombuffer(payload, dtype=np.uint8).reshape(2, run.num_tokens, STATE_BYTES // 2)
        states = halves.transpose(1, 0, 2).reshape(run.num_tokens, STATE_BYTES)
        self._kv[self._slots(run.block_table, run.first_token, run.num_tokens)] = states

    async def forget_ended(self) -> None:
        self._state.end(self._plans.end_rows())

    async def zero_blocks(self, block_ids: list[int]) -> None:
        self._kv.reshape(self.max_blocks, -1)[block_ids] = 0

    async def give_back(self, block_ids: list[int]) -> None:
        await self.zero_blocks(block_ids)

    async def resize_kv(self, num_blocks: int) -> None:
        pass

    async def expert_counts(self) -> NDArray[np.int64] | None:
        return None

    async def profile(self, num_steps: int, timeout_s: float) -> RecordedSteps:
        raise InvalidRequest("steps of this worker are not computed by torch")

    async def close(self) -> None:
        if self._last is not None:
            await asyncio.wait((self._last,))

    def _copy_blocks(self, block_copies: tuple[tuple[int, int], ...]) -> None:
        blocks = self._kv.reshape(self.max_blocks, -1)
        for source, destination in block_copies:
            blocks[destination] = blocks[source]

    def _compute(
        self, table: list[int], token_ids: np.ndarray, positions: np.ndarray, reach: Reach
    ) -> list[bytes]:
        """Stores and returns the states of new tokens in one group."""
        states = []
        for token_id, position in zip(token_ids.tolist(), positions.tolist(), strict=True):
            is_first = position == first_seen(reach, position)
            before = b"" if is_first else bytes(self._states[self._bytes_of(table, position - 1)])
            word = token_id.to_bytes(8, "little") + position.to_bytes(8, "little")
            hashed = blake2b(word, key=before, salt=self._salt, digest_size=STATE_BYTES)
            state = hashed.digest()
            self._states[self._bytes_of(table, position)] = state
            states.append(state)
        return states

    def _sample(
        self, states: list[bytes], inputs: StepInputs
    ) -> tuple[list[int], list[TokenLogprobs | None], frozenset[int]]:
        """Returns token ids, logprobs and late rows, as in `StepOutput`."""
        sampling = inputs.sampling
        masks = join_masks(sampling.masks, self._clock, lambda: self._cost.of(inputs))
        words, banned = without_banned(masks.words, sampling.banned)
        sampled = [
            self._sample_row(states[index], sampling, row, banned, words.get(row))
            for row, index in enumerate(sampling.logits_indices.tolist())
        ]
        token_ids = [token_id for token_id, _ in sampled]
        is_requested = sampling.raw_logprobs or sampling.processed_logprobs
        logprobs = [each for _, each in sampled] if is_requested else []
        return token_ids, logprobs, masks.late_rows

    def _sample_row(
        self,
        state: bytes,
        sampling: SamplingInputs,
        row: int,
        banned: list[tuple[int, int]],
        words: Words | None,
    ) -> tuple[int, TokenLogprobs | None]:
        processed = state + _noise(sampling, row) + _adjustments(sampling, row)
        ranked = None if words is None else self._ranked(processed, words)
        first = self._sample_state(processed, banned, row) if ranked is None else ranked[0]
        token_id = int(first)
        if row in sampling.raw_logprobs:
            return token_id, self._logprobs(state, token_id, sampling.raw_logprobs[row])
        num_top = sampling.processed_logprobs.get(row)
        if num_top is None:
            return token_id, None
        if ranked is None:
            return token_id, self._logprobs(processed, token_id, num_top)
        return token_id, _masked_logprobs(ranked, num_top)

    def _ranked(self, state: bytes, words: Words) -> NDArray[np.int64]:
        """Returns the allowed tokens, the most probable first: from the first token
        upwards, cyclic.
        """
        allowed = allowed_tokens(words, self.vocab_size)
        return np.roll(allowed, -int(allowed.searchsorted(self._token_id(state, 0))))

    def _sample_state(self, state: bytes, bans: list[tuple[int, int]], row: int) -> int:
        """Returns the first token that is not banned, or the first if all are."""
        banned = {token_id for each, token_id in bans if each == row}
        following = (self._token_id(state, rank) for rank in range(self._num_tokens))
        allowed = (token_id for token_id in following if token_id not in banned)
        return next(allowed, self._token_id(state, 0))

    def _prompt_logprobs(
        self, chunks: list[list[bytes]], inputs: StepInputs
    ) -> dict[int, list[TokenLogprobs]]:
        return {
            index: [
                self._logprobs(state, token_id, requested.num_top_logprobs)
                for state, token_id in zip(
                    chunks[index], requested.token_ids.tolist(), strict=False
                )
            ]
            for index, requested in inputs.prompt_logprobs.items()
        }

    def _logprobs(self, state: bytes, token_id: int, num_top_logprobs: int) -> TokenLogprobs:
        ranks = range(min(num_top_logprobs, self._num_tokens))
        rank = (token_id - self._token_id(state, 0)) % self._num_tokens
        return TokenLogprobs(
            _logprob(rank),
            tuple(self._token_id(state, each) for each in ranks),
            tuple(_logprob(each) for each in ranks),
        )

    def _token_id(self, state: bytes, rank: int) -> int:
        """Returns the token of this rank after `state`; rank 0 is the most probable."""
        number = int.from_bytes(blake2b(state, digest_size=8).digest(), "little")
        return FIRST_TOKEN_ID + (number + rank) % self._num_tokens

    @property
    def _num_tokens(self) -> int:
        return self.vocab_size - FIRST_TOKEN_ID

    def _slot(self, table: Sequence[int], position: int) -> int:
        size = self.kv_layout.block_size
        return table[position // size] * size + position % size

    def _bytes_of(self, table: Sequence[int], position: int) -> slice:
        first = self._slot(table, position) * STATE_BYTES
        return slice(first, first + STATE_BYTES)

    def _slots(self, table: Sequence[int], first_token: int, num_tokens: int) -> NDArray[np.int64]:
        size = self.kv_layout.block_size
        positions = np.arange(first_token, first_token + num_tokens)
        slots: NDArray[np.int64] = np.array(table)[positions // size] * size + positions % size
        return slots


def _joined(states: tuple[bytes, ...]) -> bytes:
    """Returns the state of a token over all groups. Groups that see the token before
    have equal states.
    """
    if len(set(states)) == 1:
        return states[0]
    return blake2b(b"".join(states), digest_size=STATE_BYTES).digest()


@lru_cache(maxsize=4096)
def _logprob(rank: int) -> float:
    """Returns a logprob in FP32, like those of a model."""
    return array("f", (-(rank + 1) * math.log(2),))[0]


def _masked_logprobs(ranked: NDArray[np.int64], num_top_logprobs: int) -> TokenLogprobs:
    """Returns the logprobs of the first of these tokens."""
    top = tuple(ranked[:num_top_logprobs].tolist())
    return TokenLogprobs(_logprob(0), top, tuple(_logprob(rank) for rank in range(len(top))))


def _noise(sampling: SamplingInputs, row: int) -> bytes:
    own = sampling.rows[row]
    if own["temperature"] == 0:
        return b""
    words = (own["seed"], own["choice_index"])
    return b"".join(int(word).to_bytes(8, "little") for word in words)


def _adjustments(sampling: SamplingInputs, row: int) -> bytes:
    """Returns the row's bias and penalties as bytes, if any: other values yield other tokens."""
    words = b""
    for each in (sampling.bias, sampling.penalties):
        if each is not None:
            own = each.rows == row
            columns = [getattr(each, name)[own] for name in each.__slots__ if name != "rows"]
            words += b"".join(column.tobytes() for column in columns)
    return words


def _pooled(chunks: list[list[bytes]], inputs: StepInputs) -> dict[int, NDArray[np.float64]]:
    """Returns the states' bytes as vectors, pooled; sums are exact."""
    found = {}
    for index, requested in inputs.pooling.items():
        states = np.frombuffer(b"".join(chunks[index]), dtype=np.uint8)
        vectors = states.reshape(-1, STATE_BYTES).astype(np.float64)
        before = 0 if requested.before is None else requested.before
        found[index] = vectors.sum(0) + before if requested.how == "mean" else vectors[-1]
    return found
