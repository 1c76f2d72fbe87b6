"""Copies of KV between a device and the host, without a device: the memory that they use."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.engine.kv.host_copies import HostCopies
from shared.engine.kv.kv_copies import KvCopies
from shared.engine.step import KvRun
from shared.kv_layout import KvGroup, KvLayout, KvShard, PagedKv

LAYERS, HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 2, 8, 16, 5
TABLE, FIRST, COUNT = [4, 1, 3], 21, 20  # from the second block on
LAYOUT = KvLayout((KvGroup((0, 1), PagedKv(HEADS, DIM, "bfloat16")),), BLOCK_SIZE)
SHARDS = [None, KvShard(0, 2, 1, 1)]
BUFFER_BYTES = 1000  # less than a payload, and not a divisor


class FakeHost:
    """Memory of the host that is page-locked."""

    def __init__(self) -> None:
        self.locked: list[Tensor] = []

    def allocate(self, num_bytes: int) -> Tensor:
        self.locked.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.locked[-1]

    def is_locked(self, tensor: Tensor) -> bool:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(
            each.data_ptr() <= start and end <= each.data_ptr() + each.nbytes
            for each in self.locked
        )

    def copies(self) -> HostCopies:
        return HostCopies(self.allocate, self.is_locked, BUFFER_BYTES)


def payload_bytes(shard: KvShard | None) -> int:
    return COUNT * (LAYERS * HEADS if shard is None else shard.num_cells) * LAYOUT.cell_bytes


def random_cache() -> Tensor:
    shape = (LAYERS, 2, NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def payload_of(cache: Tensor, shard: KvShard | None) -> bytes:
    tokens = cache[:, :, TABLE].transpose(3, 4).flatten(2, 3)  # [layers, planes, T, heads, dim]
    heads = slice(None) if shard is None else slice(shard.first_head, shard.heads.stop)
    found = tokens[:, :, FIRST : FIRST + COUNT, heads].contiguous()
    return found.view(-1).view(torch.uint8).numpy().tobytes()


def memory_of(kind: str, data: bytes, host: FakeHost) -> memoryview:
    match kind:
        case "locked":
            memory = host.allocate(len(data))
            memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return memoryview(memory.numpy())
        case "read-only":
            return memoryview(data)
        case _:
            return memoryview(bytearray(data))


@pytest.mark.parametrize("kind", ["locked", "other", "read-only"])
@pytest.mark.parametrize("shard", SHARDS)
def test_contents_are_those_of_copies_on_the_cpu(shard: KvShard | None, kind: str) -> None:
    run, cache, host = KvRun(TABLE, FIRST, COUNT, 0, shard), random_cache(), FakeHost()
    expected = bytearray(payload_bytes(shard))
    KvCopies(cache, LAYOUT).read_kv(run, memoryview(expected))
    assert expected == payload_of(cache, shard)
    if kind != "read-only":
        out = memory_of(kind, bytes(len(expected)), host)
        KvCopies(cache, LAYOUT, host_copies=host.copies()).read_kv(run, out)
        assert bytes(out) == expected
    targets = [torch.zeros_like(cache), torch.zeros_like(cache)]
    KvCopies(targets[0], LAYOUT).write_kv(run, memoryview(expected))
    written = KvCopies(targets[1], LAYOUT, host_copies=host.copies())
    written.write_kv(run, memory_of(kind, bytes(expected), host))
    assert targets[0].any()
    assert targets[0].equal(targets[1])


class Transfers(TorchDispatchMode):
    """Records the memory of the host from and to which operations copy; nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        of_host = [each for each in tensors if each.device.type == "cpu"]
        devices = {each.device.type for each in tensors}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if len(devices) == 1:
            return func(*args, **kwargs)
        self.found += of_host
        return args[0] if func is torch.ops.aten.copy_.default else func(*args, **kwargs)


@pytest.mark.parametrize("kind", ["locked", "other", "read-only"])
@pytest.mark.parametrize("shard", SHARDS)
def test_device_copies_page_locked_memory_only(shard: KvShard | None, kind: str) -> None:
    host, run = FakeHost(), KvRun(TABLE, FIRST, COUNT, 0, shard)
    cache = random_cache().to("meta")
    copies = KvCopies(cache, LAYOUT, host_copies=host.copies())
    memory = memory_of(kind, bytes(payload_bytes(shard)), host)
    with Transfers() as transfers:
        if kind != "read-only":
            copies.read_kv(run, memory)
        copies.write_kv(run, memory)
    assert sum(each.nbytes for each in transfers.found) >= memory.nbytes
    assert [each.nbytes for each in transfers.found if not host.is_locked(each)] == []


def test_other_memory_passes_through_one_buffer() -> None:
    host, run = FakeHost(), KvRun(TABLE, FIRST, COUNT)
    copies = KvCopies(random_cache(), LAYOUT, host_copies=host.copies())
    for _ in range(3):
        memory = memoryview(mmap.mmap(-1, payload_bytes(None)))
        copies.read_kv(run, memory)
        copies.write_kv(run, memory)
    assert [each.nbytes for each in host.locked].count(BUFFER_BYTES) == 1
    assert max(each.nbytes for each in host.locked) == BUFFER_BYTES
