"""Of which tenants the blocks of a pool may have KV, held or free, until they are cleared."""

from __future__ import annotations

from collections.abc import Iterable

MAX_TENANTS = 8  # of one block: then it is better cleared


class BlockTenants:
    """A block that is allocated may still have KV of those before, until it is full or cleared."""

    def __init__(self) -> None:
        self._of_block: dict[int, tuple[str, ...]] = {}  # the one of the last holder last
        self._of_tenant: dict[str, set[int]] = {}

    def of(self, tenant_id: str) -> set[int]:
        """Returns the blocks that may have KV of a tenant."""
        return self._of_tenant.get(tenant_id, set())

    def allocated(self, block_ids: Iterable[int], tenant_id: str) -> list[int]:
        """Records the next holder of blocks. Returns those that should be cleared once they are
        free, as they have had many.
        """
        crowded = []
        for block_id in block_ids:
            before = self._of_block.get(block_id, ())
            if before[-1:] != (tenant_id,):
                others = tuple(each for each in before if each != tenant_id)
                self._of_block[block_id] = (*others, tenant_id)
                self._of_tenant.setdefault(tenant_id, set()).add(block_id)
                if len(others) >= MAX_TENANTS:
                    crowded.append(block_id)
        return crowded

    def filled(self, block_id: int, tenant_id: str) -> None:
        """Records that a block is full of KV of one tenant."""
        if self._of_block.get(block_id) != (tenant_id,):
            self._set(block_id, (tenant_id,))

    def cleared(self, block_id: int, *, is_held: bool) -> None:
        """Records that a block has zeros; its holder, if there is one, has yet to write."""
        holders = self._of_block.get(block_id, ())
        self._set(block_id, holders[-1:] if is_held else ())

    def _set(self, block_id: int, tenant_ids: tuple[str, ...]) -> None:
        for each in self._of_block.pop(block_id, ()):
            own = self._of_tenant[each]
            own.discard(block_id)
            if not own and each not in tenant_ids:
                del self._of_tenant[each]
        if tenant_ids:
            self._of_block[block_id] = tenant_ids
        for each in tenant_ids:
            self._of_tenant.setdefault(each, set()).add(block_id)
