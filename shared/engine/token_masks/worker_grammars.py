"""The grammars of a worker: its vocabulary, compiled grammars, and the threads that fill masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shared.engine.token_masks.compile_cache import CompileCache
from shared.engine.token_masks.mask_job import MaskJob
from shared.engine.token_masks.mask_lanes import Lanes
from shared.engine.token_masks.output_grammar import OutputGrammar
from shared.errors import GrammarFailed, GrammarReplayFailed, HearthError
from shared.grammar.spec import GrammarSpec
from shared.grammar.vocabulary import Vocabulary
from shared.messages import WorkerLoad


class WorkerGrammars:
    """Used on the event loop's thread alone, but for `submit` of slow jobs."""

    def __init__(self, vocabulary: Vocabulary, lanes: Lanes) -> None:
        self.vocab_size = vocabulary.vocab_size
        self._lanes = lanes
        self._vocabulary = vocabulary
        self._cache = CompileCache(vocabulary.compile, lanes)
        self._collected: list[MaskJob] = []  # of the step that is being applied
        self._on_ready: Callable[[], None] = lambda: None
        self._num_late = 0
        self._num_failed = 0

    def on_ready(self, handler: Callable[[], None]) -> None:
        """`handler` is called, on any thread, when a choice that was stalled may continue."""
        self._on_ready = handler

    def start(
        self, tenant_id: str, spec: GrammarSpec, output_ids: Sequence[int] = ()
    ) -> OutputGrammar:
        """The grammar of one choice. Returns at once: it may still be compiled."""
        return OutputGrammar(spec, self._cache.get(tenant_id, spec), self, output_ids)

    def submit(self, job: MaskJob, *, is_slow: bool) -> None:
        if is_slow:
            self._lanes.submit_slow(job)
        else:
            self._collected.append(job)

    def flush(self) -> None:
        if self._collected:
            collected, self._collected = self._collected, []
            self._lanes.submit(collected)

    def await_(self, job: MaskJob, *, is_late: bool) -> None:
        self._num_late += is_late
        job.on_done = self._on_ready
        self._lanes.watch(job)
        if job.is_done:  # maybe before `on_done` was set
            self._on_ready()

    def record_end(self, error: HearthError | None) -> None:
        """A choice has ended."""
        self._num_failed += isinstance(error, GrammarFailed | GrammarReplayFailed)

    def counted(self, load: WorkerLoad) -> WorkerLoad:
        return msgspec.structs.replace(
            load,
            num_late_masks=self._num_late,
            num_failed_grammars=self._num_failed,
            num_abandoned_grammar_threads=self._lanes.num_abandoned_threads,
        )

    def release(self) -> None:
        """Frees compiled grammars and the vocabulary, while no choice has one: the next grammar
        reads it again.
        """
        self._cache.clear()
        self._vocabulary.release()

    def close(self) -> None:
        self._lanes.close()
