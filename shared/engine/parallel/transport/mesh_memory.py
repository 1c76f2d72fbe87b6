"""The memory in which the ranks of one host exchange tensors. It needs no torch: the
leader creates it.

    words | boards: 2 slots for each rank | mailboxes: 2 slots for each ordered pair of ranks
"""

from __future__ import annotations

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.transport.shared_words import LINE_BYTES, create_memory

SLOT_BYTES = 256 * 1024
NUM_SLOTS = 2
PAGE_BYTES = 4096


def num_words(num_ranks: int) -> int:
    """Returns a board's chunks for each rank; chunks sent and taken for each ordered pair."""
    return num_ranks + 2 * num_ranks * num_ranks


def data_start(num_ranks: int) -> int:
    return -(-num_words(num_ranks) * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES


def memory_bytes(num_ranks: int) -> int:
    num_boxes = num_ranks + num_ranks * num_ranks
    return data_start(num_ranks) + num_boxes * NUM_SLOTS * SLOT_BYTES


def create_mesh_memory(shape: MeshShape) -> int:
    """Returns the file descriptor that all ranks of a group map."""
    return create_memory("hearth-mesh", memory_bytes(shape.num_ranks))
