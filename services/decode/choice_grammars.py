"""The grammars and thinking budgets of the choices on this worker."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shared.engine.batching.sequence import Sequence, SequenceGrammar
from shared.engine.token_masks.budgeted_output import BudgetedOutput
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.engine.worker import EngineWorker
from shared.errors import HearthError, WorkerUnfit
from shared.grammar.spec import GRAMMAR_FEATURE
from shared.messages import Request


class ChoiceGrammars:
    def __init__(self, worker: EngineWorker, grammars: WorkerGrammars | None) -> None:
        self._worker = worker
        self._grammars = grammars

    def start(self) -> None:
        """Wakes the engine, from then on, when a stalled choice may continue."""
        if self._grammars is None:
            return
        event_loop, wake = asyncio.get_running_loop(), self._worker.loop.wake

        def wake_from_thread() -> None:
            with suppress(RuntimeError):  # the event loop is closed
                event_loop.call_soon_threadsafe(wake)

        self._grammars.on_ready(wake_from_thread)
        self._worker.count(self._grammars.counted)
        self._worker.on_parked(self._grammars.release)
        self._worker.on_dropped(self._grammars.forget)

    def attach(self, request: Request, choices: dict[int, Sequence]) -> None:
        """Gives each choice its grammar and its thinking budget, if the request has them.

        Returns at once: no token is sampled before the grammar is compiled and has replayed the
        output so far.

        Raises WorkerUnfit for a grammar on a worker without grammars.
        """
        sampling = request.sampling
        if (sampling.grammar is None and sampling.thinking is None) or request.pooling is not None:
            return
        for sequence in choices.values():
            output_ids = sequence.token_ids[sequence.num_prompt_tokens :]
            grammar = self._grammar(request, output_ids)
            if sampling.thinking is not None:
                vocab_size = self._worker.served.card.vocab_size
                grammar = BudgetedOutput(sampling.thinking, vocab_size, grammar, output_ids)
            sequence.grammar = grammar

    def _grammar(self, request: Request, output_ids: list[int]) -> SequenceGrammar | None:
        spec = request.sampling.grammar
        if spec is None:
            return None
        if self._grammars is None:
            raise WorkerUnfit(f"{self._worker.worker_id} does not have {GRAMMAR_FEATURE}")
        return self._grammars.start(request.tenant_id, spec, output_ids)

    def step_ended(self) -> None:
        """Starts to fill the next masks, while the step's tokens are sent."""
        if self._grammars is not None:
            self._grammars.flush()

    def choice_ended(self, error: HearthError | None) -> None:
        if self._grammars is not None:
            self._grammars.record_end(error)

    def request_ended(self, request: Request) -> None:
        """Forgets the compiled grammar of a request with zero retention: it holds its text."""
        if self._grammars is not None and request.is_zero_retention:
            self._grammars.forget(request.tenant_id)

    def stop(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
