"""The processes that tokenize the usual prompts: one of each loaded model, counted together."""

from __future__ import annotations

from services.gateway.preparation.preparation_pool import PreparationPool

ENCODING_PROCESS = "services.gateway.preparation.encoding_process"
MAX_LOAD_S = 180.0  # of a tokenizer that has passed its check, on a busy machine


class EncodingPools:
    """May be called from any thread. The counts are those of `PreparationPool`."""

    def __init__(self) -> None:
        self._pools: set[PreparationPool] = set()
        self.num_lost = 0  # also of pools that have ended: a counter never decreases

    @property
    def num_waiting(self) -> int:
        """Of the model with the most: each has its own queue."""
        return max((each.num_waiting for each in [*self._pools]), default=0)

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in [*self._pools])

    def open(self) -> PreparationPool:
        """One process, which starts with its first job."""
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
        """Ends its process, which nothing waits for."""
        pool.kill()
        self._pools.discard(pool)

    def _count_lost(self) -> None:
        self.num_lost += 1
