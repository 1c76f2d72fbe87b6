"""The grammar of one choice's output: its next mask is computed while the engine does other things.

                    ┌── accept ──────────────────┐
free ──a start──▶ pending ──its job is done──▶ ready ──the grammar repeats──▶ free
                    └──late for a step: stalled──┘
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from shared.engine.token_masks.compile_cache import CompiledGrammar
from shared.engine.token_masks.grammar_position import GrammarPosition
from shared.engine.token_masks.mask_job import MaskJob
from shared.engine.token_masks.mask_jobs import MaskJobs
from shared.errors import GrammarFailed, GrammarReplayFailed, HearthError
from shared.grammar.spec import GrammarSpec


class OutputGrammar:
    """A `SequenceGrammar`."""

    def __init__(
        self,
        spec: GrammarSpec,
        compiled: CompiledGrammar,
        jobs: MaskJobs,
        output_ids: Sequence[int] = (),
    ) -> None:
        """The grammar of one output. `output_ids` is the output so far, of another worker. The
        first mask may still be compiled when the prompt is computed: then it is late.
        """
        self._compiled = compiled
        self._jobs = jobs
        self._position = GrammarPosition(spec, compiled.new_matcher)
        self._job: MaskJob | None = None
        self._is_awaited = False
        self.num_late_masks = 0
        if output_ids:
            self._start(output_ids, is_slow=True, refusal=GrammarReplayFailed)
            self._await(is_late=False)
        elif not self._position.is_free:
            self._start()

    @property
    def is_stalled(self) -> bool:
        return self._is_awaited and self._job is not None and not self._job.is_done

    @property
    def error(self) -> HearthError | None:
        if self._job is not None and self._job.error is not None:
            return self._job.error
        return self._compiled.error

    @property
    def bans_stop(self) -> bool:
        return self._position.bans_stop

    @property
    def num_free_tokens(self) -> int:
        return 0  # any token may end the free ones

    def mask(self) -> MaskJob | None:
        self._jobs.flush()
        job = self._job
        is_free = job is not None and job.is_done and self._position.is_free
        return None if is_free else job

    def accept(self, token_id: int) -> None:
        last, self._job, self._is_awaited = self._job, None, False
        if not self._position.is_free:
            self._start((token_id,), is_slow=last is not None and last.is_slow)
            return
        self._position.advance((token_id,))
        if not self._position.is_free:
            self._start()

    def sit_out(self) -> None:
        self.num_late_masks += 1
        self._await(is_late=True)

    def _await(self, *, is_late: bool) -> None:
        if self._job is not None:
            self._is_awaited = True
            self._jobs.await_(self._job, is_late=is_late)

    def _start(
        self,
        token_ids: Sequence[int] = (),
        *,
        is_slow: bool = False,
        refusal: type[HearthError] = GrammarFailed,
    ) -> None:
        owner = weakref.ref(self)
        self._job = job = MaskJob(
            self._compiled.tenant_id,
            self._position,
            token_ids,
            vocab_size=self._jobs.vocab_size,
            is_wanted=lambda: owner() is not None,
            refusal=refusal,
        )
        if self._compiled.is_done:
            _begin(job, token_ids, self._compiled, self._jobs, is_slow=is_slow)
        else:  # holds no reference to this object, which may end first
            compiled, jobs = self._compiled, self._jobs
            compiled.when_done(lambda: _begin(job, token_ids, compiled, jobs, is_slow=True))


def _begin(
    job: MaskJob,
    token_ids: Sequence[int],
    compiled: CompiledGrammar,
    jobs: MaskJobs,
    *,
    is_slow: bool,
) -> None:
    if not token_ids and compiled.first_words is not None:
        job.end(compiled.first_words)
    else:
        jobs.submit(job, is_slow=is_slow)
