"""The processes that tokenize the usual prompts, one for each loaded model, and their load
together.
"""

from __future__ import annotations

from services.gateway.preparation.preparation_pool import PreparationPool

ENCODING_PROCESS = "services.gateway.preparation.encoding_process"
MAX_LOAD_S = 180.0  # seconds for a tokenizer that has passed its check, on a busy machine


class EncodingPools:
    """Counts as one `PreparationPool` does. May be used by any thread."""

    def __init__(self) -> None:
        self._pools: set[PreparationPool] = set()
        self.num_lost = 0  # includes pools that have ended: a counter never decreases

    @property
    def num_waiting(self) -> int:
        """The jobs that wait for the model with the most: each has its own queue."""
        return max((each.num_waiting for each in [*self._pools]), default=0)

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in [*self._pools])

    def open(self) -> PreparationPool:
        """Returns a pool of one process, which starts with its first job."""
        pool = PreparationPool(
            None,
            num_processes=1,
            module=ENCODING_PROCESS,
            hang_s=MAX_LOAD_S,
            is_costly=True,
            on_lost=self._count_lost,
        )
        self._pools.add(pool)
        return pool

    def end(self, pool: PreparationPool) -> None:
        """Ends the process of a pool without waiting for it."""
        pool.kill()
        self._pools.discard(pool)

    def _count_lost(self) -> None:
        self.num_lost += 1
