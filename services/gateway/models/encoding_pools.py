"""The processes that tokenize the usual prompts: one of each loaded model, counted together."""

from __future__ import annotations

from services.gateway.preparation.preparation_pool import PreparationPool

ENCODING_PROCESS = "services.gateway.preparation.encoding_process"
MAX_LOAD_S = 180.0  # of a tokenizer that has passed its check, on a busy machine


class EncodingPools:
    """May be called from any thread. The counts are those of `PreparationPool`."""

    def __init__(self) -> None:
        self._pools: set[PreparationPool] = set()
        self._num_lost = 0  # of pools that have ended

    @property
    def num_waiting(self) -> int:
        return sum(each.num_waiting for each in [*self._pools])

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in [*self._pools])

    @property
    def num_lost(self) -> int:
        return self._num_lost + sum(each.num_lost for each in [*self._pools])

    def open(self) -> PreparationPool:
        """One process, which starts with its first job."""
        pool = PreparationPool(
            None, num_processes=1, module=ENCODING_PROCESS, hang_s=MAX_LOAD_S, is_costly=True
        )
        self._pools.add(pool)
        return pool

    def end(self, pool: PreparationPool) -> None:
        """Ends its process, which nothing waits for."""
        pool.kill()
        self._pools.discard(pool)
        self._num_lost += pool.num_lost
