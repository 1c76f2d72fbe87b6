"""The grammars of a worker: its vocabulary, compiled grammars, and the threads that fill masks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.engine.token_masks.compile_cache import CompileCache
from shared.engine.token_masks.mask_jobs import MaskJobs
from shared.engine.token_masks.mask_threads import GrammarThreads
from shared.engine.token_masks.output_grammar import OutputGrammar
from shared.errors import GrammarFailed, GrammarReplayFailed, HearthError
from shared.grammar.spec import GrammarSpec
from shared.grammar.vocabulary import Vocabulary
from shared.messages import WorkerLoad


class WorkerGrammars:
    """Used on the event loop's thread alone."""

    def __init__(self, vocabulary: Vocabulary, threads: GrammarThreads) -> None:
        self._threads = threads
        self._vocabulary = vocabulary
        self._cache = CompileCache(vocabulary.compile, threads)
        self._jobs = MaskJobs(threads, vocab_size=vocabulary.vocab_size)
        self.on_ready, self.flush = self._jobs.on_ready, self._jobs.flush
        self._num_failed = 0

    def start(
        self, tenant_id: str, spec: GrammarSpec, output_ids: Sequence[int] = ()
    ) -> OutputGrammar:
        """Starts the grammar of one choice. Returns at once: it may still be compiled."""
        return OutputGrammar(spec, self._cache.get(tenant_id, spec), self._jobs, output_ids)

    def record_end(self, error: HearthError | None) -> None:
        """A choice has ended."""
        self._num_failed += isinstance(error, GrammarFailed | GrammarReplayFailed)

    def counted(self, load: WorkerLoad) -> WorkerLoad:
        return msgspec.structs.replace(
            load,
            num_late_masks=self._jobs.num_late,
            num_failed_grammars=self._num_failed,
            num_abandoned_grammar_threads=self._threads.num_abandoned_threads,
        )

    def forget(self, tenant_id: str) -> None:
        """Forgets the compiled grammars of a tenant; choices that have one keep it."""
        self._cache.forget(tenant_id)

    def release(self) -> None:
        """Frees compiled grammars and the vocabulary, while no choice has one: the next grammar
        reads it again.
        """
        self._cache.clear()
        self._vocabulary.release()

    def close(self) -> None:
        self._threads.close()
