"""The engine core: sequences, blocks and batches, synchronous and torch-free.

The owner calls `schedule`, has an executor compute the step, and calls `apply` with its output. All
other methods may be called between the two, while the step computes, and so may `schedule` for
steps after it: all apply in order. Blocks become free only once no step in flight uses them, so a
sequence that ends, or is aborted, may keep them longer than its state says.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.block_hash import PUBLIC_TENANT_ID, extend_chain, image_extras
from shared.engine.batching.batcher import Batcher, ScheduledSequence
from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.sampling.checks import check_sampling
from shared.engine.step import StepOutput
from shared.errors import ConfigError, ContextFull, HearthError, InvalidRequest
from shared.kv_layout import Reach, first_sent
from shared.messages import FinishReason, SamplingParams, TokenLogprobs


class StepProgress(msgspec.Struct, frozen=True):
    """The result of one step for one sequence. `token_ids` excludes a stop token."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # all, once, with the first sampled token
    embedding: NDArray[np.float32] | None = None  # [hidden_size], when an embedding finishes
    error: HearthError | None = None  # set if the finish_reason is "failed"


class Engine:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_context_tokens: int,
        max_batch_tokens: int,
        max_sequences: int,
        max_reserved_share: float = 0.5,
        reaches: tuple[Reach, ...] = (None,),
        zeroes_freed_blocks: bool = False,
        num_floor_blocks: int | None = None,
    ) -> None:
        """Schedules sequences on a pool of blocks. `max_context_tokens` is the model's limit.

        A sequence may also be no longer than a pool of `num_floor_blocks` holds, the fewest that it
        has while it serves; None: `num_blocks`, and 0 of these are for an engine that serves after
        `resize`. `reaches` are those of the executor's groups of layers. With
        `zeroes_freed_blocks` the owner has the executor zero freed blocks before they are written
        again: see `EngineLoop.zero_freed_blocks`. Raises ConfigError if the pool is too small.
        """
        self.pool = BlockPool(
            num_blocks, block_size, reaches=reaches, notes_freed=zeroes_freed_blocks
        )
        self.batcher = Batcher(
            self.pool, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences
        )
        self.model_context_tokens = max_context_tokens
        floor = num_blocks if num_floor_blocks is None else num_floor_blocks
        self.max_context_tokens = self.batcher.needs.most_tokens(floor, max_context_tokens)
        if 0 < num_blocks < self.num_least_blocks:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks is smaller than its floor of {floor}",
                param="kv_cache_bytes",
            )
        self.num_generated_tokens = 0  # tokens since the start
        self.num_computed_prompt_tokens = 0
        self._bounded = [group for group, reach in enumerate(reaches) if reach is not None]
        self._max_reserved_share = max_reserved_share
        self._reserved: set[Sequence] = set()
        self._held: set[Sequence] = set()
        self._ending: set[Sequence] = set()  # finished; steps in flight still use their blocks

    @property
    def num_least_blocks(self) -> int:
        """The fewest that hold one sequence of `max_context_tokens`."""
        return self.batcher.needs.peak(self.max_context_tokens)

    @property
    def num_reserved_blocks(self) -> int:
        return sum(sequence.num_held_blocks for sequence in self._reserved)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that waiting and running sequences still have to compute."""
        batcher = self.batcher
        ahead = [*batcher.waiting, *batcher.running]
        return sum(each.num_uncomputed_tokens for each in ahead if each.num_uncomputed_tokens > 1)

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens computed and tokens sampled since the start."""
        return self.num_computed_prompt_tokens + self.num_generated_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV the running sequences read in each step."""
        return sum(each.num_computed_tokens for each in self.batcher.running)

    @property
    def is_idle(self) -> bool:
        batcher = self.batcher
        is_empty = not (batcher.waiting or batcher.running or self._reserved or self._held)
        return is_empty and not self._ending

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks. Running sequences continue, but may have to be
        computed again.

        0 is allowed only while no sequence is left (else ValueError): then none may be added until
        the next call. Raises InvalidRequest for fewer than `num_least_blocks`.
        """
        if num_blocks == 0 and not self.is_idle:
            raise ValueError("an engine with sequences needs blocks")
        if num_blocks:
            self.check_size(num_blocks)
        self.pool.resize(num_blocks)

    def check_size(self, num_blocks: int) -> None:
        """Raises InvalidRequest for fewer blocks than `num_least_blocks`."""
        if num_blocks < self.num_least_blocks:
            raise InvalidRequest(
                f"a KV cache of {num_blocks} blocks holds no sequence of {self.max_context_tokens} "
                f"tokens, which needs {self.num_least_blocks}",
                param="kv_bytes",
            )

    def accept(self, sequence: Sequence) -> None:
        """Adds missing block hashes. Raises InvalidRequest for a sequence that no engine of this
        model can compute, and ContextFull for one that only this engine's pool is too small for.
        """
        self.check_fits(sequence.num_tokens)
        check_samplable(sequence)
        if sequence.image_parts:
            sequence.block_extras = image_extras(sequence.image_parts, self.pool.block_size)
        full = sequence.num_tokens // self.pool.block_size
        if len(sequence.block_hashes) > full:
            raise InvalidRequest(
                f"{len(sequence.block_hashes)} block hashes for {full} full blocks"
            )
        if sequence.num_public_blocks > len(sequence.block_hashes):
            raise InvalidRequest(
                f"{len(sequence.block_hashes)} block hashes, {sequence.num_public_blocks} public"
            )
        self._extend_hashes(sequence, full)

    def check_fits(self, num_tokens: int) -> None:
        """Raises InvalidRequest for a sequence longer than the model's context, and ContextFull for
        one longer than the pool.
        """
        if num_tokens > self.model_context_tokens:
            raise InvalidRequest(
                f"{num_tokens} tokens do not fit the model's context of {self.model_context_tokens}"
            )
        if num_tokens > self.max_context_tokens:
            raise ContextFull(
                f"{num_tokens} tokens do not fit this worker's KV cache of "
                f"{self.max_context_tokens}"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises InvalidRequest and ContextFull if it can never be computed."""
        self.accept(sequence)
        self.batcher.add(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Holds blocks for all its tokens while another worker computes them. Returns False if too
        few blocks are free, reservations have reached their share, or a preempted sequence waits
        for blocks. Raises like `add`.
        """
        self.accept(sequence)
        if any(each.num_preemptions for each in self.batcher.waiting):
            return False
        needed = self.batcher.needs.peak(sequence.num_tokens)
        max_reserved = int(self.pool.num_blocks * self._max_reserved_share)
        is_over_share = self.num_reserved_blocks + needed > max_reserved
        if self._reserved and is_over_share:  # a single one may exceed it, or it would never run
            return False
        if not self.batcher.allocate_prompt(sequence, spare=0, is_received=True):
            return False
        sequence.state = SequenceState.RESERVED
        self._reserved.add(sequence)
        return True

    def activate(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The KV of the first `num_computed_tokens` has arrived; the engine computes the rest.

        A prefill with nothing left to compute becomes HELD. Raises ValueError if
        `num_computed_tokens` is less than was cached, or leaves a sampling sequence no token to
        compute. A sequence with bounded groups, whose KV has arrived in part, is computed again
        from what the cache holds.
        """
        num_before = sequence.num_computed_tokens
        if not num_before <= num_computed_tokens <= sequence.num_prefill_tokens:
            raise ValueError(
                f"the KV of {num_computed_tokens} of {sequence.num_tokens} tokens arrived, "
                f"expected {num_before} to {sequence.num_prefill_tokens}"
            )
        self._reserved.remove(sequence)
        sequence.transition_to(SequenceState.WAITING)
        if self._bounded and num_computed_tokens < sequence.num_prefill_tokens:
            self.batcher.restart(sequence)  # the bounded groups lack the keys before the end
            return
        sequence.num_computed_tokens = num_computed_tokens
        self._commit_full_blocks(sequence)
        if sequence.num_uncomputed_tokens == 0:
            sequence.transition_to(SequenceState.HELD)
            self._held.add(sequence)
        else:
            self.batcher.add(sequence)

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Ends a HELD prefill; the children, accepted before, each continue from its KV.

        Their tokens start with the parent's. A child that requests prompt logprobs takes them from
        the parent. Raises ValueError if the parent is not HELD, is HELD because its step failed, or
        if a child would compute a token that the parent has computed.
        """
        if parent.state is not SequenceState.HELD or parent.num_uncomputed_tokens:
            raise ValueError(
                f"a {parent.state.value} sequence that lacks the KV of "
                f"{parent.num_uncomputed_tokens} tokens cannot be forked"
            )
        if any(child.num_tokens <= parent.num_tokens for child in children):
            raise ValueError("a child must have at least one token more than its parent")
        if any(child.needs_every_token for child in children) and parent.prompt_logprobs is None:
            raise ValueError("a sequence that must compute every token cannot be forked")
        for child in children:
            child.is_zero_retention |= parent.is_zero_retention  # its tenant may have got it since
            if child.prompt_logprobs is not None:
                child.prompt_logprobs = parent.prompt_logprobs
        self.batcher.fork(parent, children)
        self._finish(parent)

    def drop_tenants(self, tenant_ids: frozenset[str]) -> int:
        """Makes the KV of tenants unfindable, and has it zeroed: now, or for sequences that still
        run at their ends. Returns the number of blocks that were findable.
        """
        for sequence in self._sequences():
            if sequence.tenant_id in tenant_ids:
                sequence.is_zero_retention = True
                for held in sequence.held_blocks:
                    self.pool.make_private(held)
        return sum(map(self.pool.drop_tenant, sorted(tenant_ids)))

    @property
    def tenants_with_held_blocks(self) -> set[str]:
        return {each.tenant_id for each in self._sequences() if each.num_held_blocks}

    def num_held_blocks_of(self, tenant_id: str) -> int:
        """Returns the blocks that sequences of a tenant hold; shared ones count more than once."""
        own = (each for each in self._sequences() if each.tenant_id == tenant_id)
        return sum(each.num_held_blocks for each in own)

    def _sequences(self) -> list[Sequence]:
        batcher, others = self.batcher, (self._reserved, self._held, self._ending)
        return [*batcher.waiting, *batcher.running, *chain(*others)]

    def release(self, sequence: Sequence) -> None:
        """Ends a HELD prefill, whose push has finished or is no longer wanted."""
        self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Aborts a sequence. Idempotent. The blocks become free now, or when its last step
        in flight ends.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.is_in_step:
            sequence.is_aborted = True
            return
        self._finish(sequence)

    def schedule(
        self, *, samples_ahead: bool = False, num_stages: int = 1
    ) -> tuple[list[ScheduledSequence], list[StepProgress]]:
        """Returns the rows of the next step (empty: no work), prefills that need no step, and
        sequences that failed between two steps.

        With `samples_ahead` a row may compute the token that a step in flight samples for it: the
        device holds that token before the host does. If a row depends on more than its token,
        there is no step ahead: the rows that do not would take a step for each that it waits.
        `num_stages` is as in `Batcher.schedule`.
        """
        failed = self._end_failed()
        if samples_ahead:
            if any(map(self._awaits_token, self.batcher.running)):
                return [], failed
            rows, found = self.batcher.schedule(self._may_sample_ahead)
        else:
            rows, found = self.batcher.schedule(num_stages=num_stages)
        for row in rows:
            row.sequence.in_flight.append(row)
        self._held.update(found)
        return rows, failed + [StepProgress(sequence) for sequence in found]

    def apply(
        self,
        rows: list[ScheduledSequence],
        output: StepOutput,
        void: Collection[Sequence] = (),
    ) -> list[StepProgress]:
        """Applies a computed step, which sampled one token for each sampling row, in order. Rows of
        `void` sequences only leave the step: an earlier step of theirs has failed.

        A late row advances by all its tokens but the last, which is computed again: it writes the
        same KV, and samples with the same noise.
        """
        token_ids = _without_late(output)
        sampled = zip(token_ids, output.logprobs or repeat(None), strict=False)
        block_size = self.pool.block_size
        progress = []
        for index, row in enumerate(rows):
            sequence, samples = row.sequence, row.samples
            token_id, logprobs = next(sampled) if samples else (None, None)
            self._leave_step(row)
            if void and sequence in void:
                continue
            if sequence.is_aborted:
                self._drop(sequence)
                continue
            num_tokens = row.num_scheduled_tokens
            if samples and token_id is None:
                num_tokens -= 1
                _sit_out(sequence)
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                self._count_prompt(sequence, num_tokens)
            if sequence.sampling is None or sequence.prompt_logprobs is not None:
                _collect(sequence, index, output)
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens >= (sequence.num_committed_blocks + 1) * block_size:
                self._commit_full_blocks(sequence)
                for group in self._bounded:
                    self._drop_unseen_blocks(sequence, group)
            if token_id is None:
                progress.append(self._advance_unsampled(sequence))
            else:
                self.num_generated_tokens += 1
                progress.append(self._advance(sequence, token_id, logprobs))
        return progress

    def take_back(
        self, rows: list[ScheduledSequence], void: Collection[Sequence] = ()
    ) -> list[ScheduledSequence]:
        """Returns the rows of a failed step that must be computed again. The others leave it: those
        of finished sequences, and those of `void` ones, whose earlier step has failed.
        """
        kept = []
        for row in rows:
            sequence = row.sequence
            is_finished = sequence.state is SequenceState.FINISHED
            if not is_finished and sequence not in void:
                kept.append(row)
                continue
            self._leave_step(row)
            if is_finished:
                self._drop(sequence)
        return kept

    def unschedule(self, rows: list[ScheduledSequence]) -> None:
        """Takes rows out of a step that computed none of them: they are scheduled again. One whose
        blocks the step would have copied is computed again from what the cache holds.
        """
        for row in rows:
            sequence = row.sequence
            self._leave_step(row)
            if sequence.is_aborted:
                self._drop(sequence)
            elif row.block_copies:
                self.batcher.preempt(sequence)

    def fail(self, rows: list[ScheduledSequence], error: HearthError) -> list[StepProgress]:
        """Ends the sequences of rows that could not be computed; the others continue.

        A prefill holds its blocks until `release`, because a push may still read them.
        """
        progress = []
        for row in rows:
            sequence = row.sequence
            self._leave_step(row)
            if sequence.is_aborted:
                self._drop(sequence)
            elif not sequence.is_prefill_only:
                self._finish(sequence)
            else:
                self._hold(sequence)
            if not sequence.is_aborted:
                progress.append(StepProgress(sequence, finish_reason="failed", error=error))
        return progress

    def _advance(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> StepProgress:
        params = sequence.sampling
        assert params is not None
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.prompt_logprobs is not None:
            prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
        if token_id in sequence.stop_token_ids and _may_stop(sequence, params):
            self._finish(sequence)
            return StepProgress(
                sequence,
                finish_reason="stop",
                stop_token_id=token_id,
                prompt_logprobs=prompt_logprobs,
            )
        sequence.token_ids.append(token_id)
        num_tokens = len(sequence.token_ids)
        is_long = num_tokens - sequence.num_prompt_tokens >= params.max_tokens
        finish_reason: FinishReason | None = None
        error: ContextFull | None = None
        if is_long or num_tokens >= self.model_context_tokens:
            finish_reason = "length"
        elif num_tokens > self.max_context_tokens:
            # a worker with a larger pool continues it
            finish_reason = "failed"
            error = ContextFull(f"this worker's KV cache holds {self.max_context_tokens} tokens")
        if finish_reason is not None:
            self._finish(sequence)
        elif sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        if finish_reason is None and logprobs is None and not prompt_logprobs:
            return StepProgress(sequence, (token_id,))  # the common case, in half the time
        return StepProgress(
            sequence,
            (token_id,),
            finish_reason=finish_reason,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=prompt_logprobs,
            error=error,
        )

    def _advance_unsampled(self, sequence: Sequence) -> StepProgress:
        """Advances a row without a token: late, a chunk, or the end of a prefill or embedding."""
        if sequence.num_uncomputed_tokens > 0:
            return StepProgress(sequence)
        if sequence.is_prefill_only:
            self._hold(sequence)
            return StepProgress(sequence)
        assert sequence.pooled is not None
        num_pooled = sequence.num_tokens if sequence.pooling == "mean" else 1
        self._finish(sequence)
        embedding = (sequence.pooled / num_pooled).astype(np.float32)
        return StepProgress(sequence, finish_reason="stop", embedding=embedding)

    def _leave_step(self, row: ScheduledSequence) -> None:
        row.sequence.in_flight.remove(row)
        if row.block_copies:
            self.pool.release([source for source, _ in row.block_copies])

    def _end_failed(self) -> list[StepProgress]:
        """Ends the sequences whose grammar or images failed, whether they run or wait. A prefill
        holds its blocks until `release`.
        """
        progress = []
        for sequence in [*self.batcher.running, *self.batcher.waiting]:
            if sequence.grammar is None and sequence.images is None:
                continue  # the common case, without a call
            error = sequence.error
            if error is not None and sequence.is_prefill_only and sequence.in_flight:
                continue
            if error is not None:
                end = self._hold if sequence.is_prefill_only else self._finish
                end(sequence)
                progress.append(StepProgress(sequence, finish_reason="failed", error=error))
        return progress

    def _count_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        num_left = sequence.num_prompt_tokens - sequence.num_computed_tokens
        self.num_computed_prompt_tokens += min(num_left, num_tokens)

    def _hold(self, sequence: Sequence) -> None:
        self.batcher.remove(sequence)
        sequence.transition_to(SequenceState.HELD)
        self._held.add(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.batcher.remove(sequence)
        self._reserved.discard(sequence)
        self._held.discard(sequence)
        sequence.transition_to(SequenceState.FINISHED)
        if sequence.in_flight:
            sequence.is_aborted = True
            self._ending.add(sequence)
        else:
            self.batcher.give_back(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """A step of an aborted or finished sequence has ended."""
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence)
        elif not sequence.in_flight:
            self._ending.discard(sequence)
            self.batcher.give_back(sequence)

    def _may_sample_ahead(self, sequence: Sequence) -> bool:
        """Whether the next inputs do not depend on the token being sampled, and only a stop token
        could end the sequence there.
        """
        return not (self._ends_at_token(sequence) or _depends_on_token(sequence))

    def _awaits_token(self, sequence: Sequence) -> bool:
        """Whether a step in flight samples a token that is needed for the next step's inputs."""
        if not sequence.in_flight or not sequence.in_flight[-1].samples or sequence.is_aborted:
            return False
        return _depends_on_token(sequence) and not self._ends_at_token(sequence)

    def _ends_at_token(self, sequence: Sequence) -> bool:
        """Whether the token that is being sampled is its last one here."""
        params, num_tokens = sequence.sampling, sequence.next_num_tokens
        if params is None or num_tokens - sequence.num_prompt_tokens >= params.max_tokens:
            return True
        return num_tokens > min(self.model_context_tokens - 1, self.max_context_tokens)

    def _commit_full_blocks(self, sequence: Sequence) -> None:
        first = sequence.num_committed_blocks
        full = sequence.num_computed_tokens // self.pool.block_size
        if full <= first:
            return
        self._extend_hashes(sequence, full)
        public = min(full, max(first, sequence.num_public_blocks))
        self._commit(sequence, first, public, PUBLIC_TENANT_ID)
        if not sequence.is_zero_retention:
            self._commit(sequence, public, full, sequence.tenant_id)
        sequence.num_committed_blocks = full

    def _commit(self, sequence: Sequence, first: int, last: int, tenant_id: str) -> None:
        is_public = tenant_id == PUBLIC_TENANT_ID
        for group, table in enumerate(sequence.block_tables):
            begin = max(first, sequence.first_blocks[group])
            if begin < last:
                self.pool.commit(
                    group,
                    table[begin:last],
                    sequence.block_hashes[begin:last],
                    tenant_id=tenant_id,
                    parent_hash=sequence.parent_hash_of(begin),
                    first_block_index=begin,
                    kv_quota_tokens=0 if is_public else sequence.kv_quota_tokens,
                    region_class="" if is_public else sequence.region_class,
                )

    def _drop_unseen_blocks(self, sequence: Sequence, group: int) -> None:
        """Releases blocks that no later token of the sequence sees, and that a prefill does not
        send; they stay cached until evicted.
        """
        size = self.pool.block_size
        end = self.batcher.needs.first(group, sequence.num_computed_tokens)
        if sequence.is_prefill_only:
            reach = self.pool.reaches[group]
            end = min(end, first_sent(reach, sequence.num_tokens, size) // size)
        first = sequence.first_blocks[group]
        if end > first:
            self.pool.release(sequence.block_tables[group][first:end])
            sequence.first_blocks[group] = end

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        known = len(sequence.block_hashes)
        if known >= num_blocks:
            return
        size = self.pool.block_size
        tokens = sequence.token_ids[known * size : num_blocks * size]
        sequence.block_hashes += extend_chain(
            sequence.parent_hash_of(known), tokens, size, sequence.block_extras, first_block=known
        )


def _may_stop(sequence: Sequence, params: SamplingParams) -> bool:
    """Whether the sequence may end at this token. A grammar that allows only the end ends
    before min_tokens.
    """
    return sequence.grammar is not None or sequence.num_output_tokens >= params.min_tokens


def _without_late(output: StepOutput) -> list[int | None]:
    """[R] sampled tokens; None: the row's mask came late."""
    if not output.late_rows:
        return [*output.token_ids]
    return [
        None if row in output.late_rows else token_id
        for row, token_id in enumerate(output.token_ids)
    ]


def _sit_out(sequence: Sequence) -> None:
    assert sequence.grammar is not None
    sequence.grammar.sit_out()


def _collect(sequence: Sequence, index: int, output: StepOutput) -> None:
    """Stores the chunk's prompt logprobs and pooled sum; a preempted sequence starts again."""
    if sequence.prompt_logprobs is not None:
        logprobs = output.prompt_logprobs.get(index, [])
        sequence.prompt_logprobs[sequence.num_computed_tokens :] = logprobs
    sequence.pooled = output.pooled.get(index)


def _depends_on_token(sequence: Sequence) -> bool:
    """Whether the inputs of its next step depend on the token being sampled by more than itself."""
    params = sequence.sampling
    if params is not None and (params.bad_words or params.is_penalized):
        return True
    if sequence.grammar is None:
        return False
    num_sampled = sequence.next_num_tokens - len(sequence.token_ids)
    return sequence.grammar.num_free_tokens <= num_sampled


def check_samplable(sequence: Sequence) -> None:
    """Raises InvalidRequest for a sequence that would fail, or exceed max_tokens, in a batch."""
    params = sequence.sampling
    if sequence.num_tokens == 0:
        raise InvalidRequest("a sequence needs at least one token")
    if params is None:
        return
    if sequence.num_output_tokens >= params.max_tokens:
        raise InvalidRequest(
            f"{sequence.num_output_tokens} output tokens reach max_tokens {params.max_tokens}"
        )
    if sequence.choice_index >= 2**63:
        raise InvalidRequest("choice_index must be a signed 64-bit integer")
    check_sampling(params)
