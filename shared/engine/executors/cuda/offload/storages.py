"""Finds the memory of a model: its storages, which several tensors may share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_OWN_CODE = ("shared", "kernels", "torch")  # others' objects hold no weights


def storages_of(root: object, besides: Iterable[Tensor] = ()) -> list[torch.UntypedStorage]:
    """Returns each storage of the tensors that `root` refers to, once, except those of `besides`,
    empty ones, and those whose memory is not the allocator's.

    Tensors refer to a storage, not to an address: all views, tied weights and planes of a
    compressed one follow when it gets other memory.
    """
    known = {each.untyped_storage()._cdata for each in besides}
    found = []
    for tensor in tensors_in(root):
        storage = tensor.untyped_storage()
        if storage._cdata in known or tensor.is_meta:
            continue
        known.add(storage._cdata)
        if storage.nbytes() and storage.resizable():
            found.append(storage)
    return found


def tensors_in(root: object) -> Iterator[Tensor]:
    """Returns the tensors in the attributes of modules and of other objects of this code, and in
    containers; each once.
    """
    left, seen = [root], dict[int, object]()  # objects are held: an id may be used again
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        else:
            left += _parts(each)


def _parts(each: Any) -> Iterable[object]:
    if isinstance(each, Mapping):
        return each.values()
    if isinstance(each, list | tuple | set | frozenset):
        return each
    if isinstance(each, type) or type(each).__module__.partition(".")[0] not in _OWN_CODE:
        return ()
    slots = (name for base in type(each).__mro__ for name in getattr(base, "__slots__", ()))
    found = [getattr(each, name, None) for name in slots]
    return [*found, *getattr(each, "__dict__", {}).values()]


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns the whole storage: [num_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
