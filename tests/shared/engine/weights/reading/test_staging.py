"""A ring of slots between readers and a device, of plain memory; copies end on request."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import save_file

from shared.engine.weights.checkpoint_files import Reading, SafetensorsFile
from shared.engine.weights.load import fill
from shared.engine.weights.reading.staging import LocalStaging, Slot, StagingRing, Wait, num_readers
from shared.errors import CheckpointError

NUM_SLOTS, SLOT_BYTES = 3, 4096
TENSORS = {
    **{f"matrix {i}": torch.randn(200 + i, 96, dtype=torch.bfloat16) for i in range(12)},
    "long rows": torch.randn(3, 5000),
    "number": torch.tensor(3.5),
    "nothing": torch.randn(0, 4),
}


@dataclass
class Copies:
    """Counts copies that have begun, and have been waited for."""

    begun: int = 0
    ended: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self) -> Wait:
        with self.lock:
            self.begun += 1

        def wait() -> None:
            with self.lock:
                self.ended += 1

        return wait


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def ring(copies: Copies) -> StagingRing:
    slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    return StagingRing(slots, copies.record, SLOT_BYTES)


def write(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("num_threads", [1, 8])
def test_readers_fill_all_tensors(
    tmp_path: Path, ring: StagingRing, copies: Copies, num_threads: int
) -> None:
    """More readers than slots, rows longer than a slot, and other dtypes."""
    found = {name: torch.empty(each.shape, dtype=torch.float32) for name, each in TENSORS.items()}
    with ExitStack() as stack, ThreadPoolExecutor(num_threads) as readers:
        file = SafetensorsFile(write(tmp_path), stack, Reading(ring))
        fill(file, found, readers)
    ring.close()
    assert copies.begun == copies.ended > len(TENSORS)
    for name, each in TENSORS.items():
        assert torch.equal(found[name], each.float())


def test_readers_share_a_large_tensor(tmp_path: Path) -> None:
    """Each reads rows of a slot; the first two wait for each other."""
    together, num_slots = Barrier(2), count()

    class Meeting(LocalStaging):
        num_bytes = SLOT_BYTES

        @contextmanager
        def slot(self) -> Iterator[Slot]:
            if next(num_slots) < 2:
                together.wait(timeout=5)
            with super().slot() as slot:
                yield slot

    large = torch.randn(300, 70)
    save_file({"large": large}, tmp_path / "model.safetensors")
    found = torch.empty(large.shape)
    with ExitStack() as stack, ThreadPoolExecutor(2) as readers:
        file = SafetensorsFile(tmp_path / "model.safetensors", stack, Reading(Meeting()))
        fill(file, {"large": found}, readers)  # type: ignore[arg-type]
    assert torch.equal(found, large)
    assert next(num_slots) == -(-300 // (SLOT_BYTES // 280))


def test_slot_is_not_given_again_before_its_copy_has_ended(
    ring: StagingRing, copies: Copies
) -> None:
    out = torch.empty(8, dtype=torch.uint8)
    for _ in range(NUM_SLOTS):
        with ring.slot() as slot:
            slot.send(slot.memory[:8], out)
    assert (copies.begun, copies.ended) == (NUM_SLOTS, 0)
    with ring.slot():
        assert copies.ended == 1


def test_failed_reader_gives_its_slot_back(ring: StagingRing) -> None:
    for _ in range(NUM_SLOTS + 1):
        with pytest.raises(ValueError, match="bad"), ring.slot():
            raise ValueError("bad")
    ring.close()


def test_closed_ring_holds_no_memory(copies: Copies) -> None:
    """Whoever still refers to the ring."""
    memory = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    slots, out = [weakref.ref(memory)], torch.empty(8, dtype=torch.uint8)
    ring = StagingRing([memory], copies.record, SLOT_BYTES)
    with ring.slot() as slot:
        slot.send(slot.memory[:8], out)
    del memory, slot
    assert slots[0]() is not None
    ring.close()
    assert (copies.begun, copies.ended, slots[0]()) == (1, 1, None)


def test_torn_file_ends_all_readers_with_one_error(tmp_path: Path, ring: StagingRing) -> None:
    found = {name: torch.empty(each.shape) for name, each in TENSORS.items()}
    with ExitStack() as stack, ThreadPoolExecutor(4) as readers:
        path = write(tmp_path)
        file = SafetensorsFile(path, stack, Reading(ring))
        with path.open("rb+") as torn:
            torn.truncate(path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="the file ends before the tensor does"):
            fill(file, found, readers)
        ring.close()


def test_number_of_readers() -> None:
    assert 4 <= num_readers() <= 8
