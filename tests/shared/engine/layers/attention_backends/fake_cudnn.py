"""A frontend of cuDNN without cuDNN: a graph of prefill attention computes what its documentation
says, one token after the other, from the pointers that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class FakeTensor:
    name: str = ""
    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: str = ""
    offsets: FakeTensor | None = None

    def set_output(self, is_output: bool) -> FakeTensor:
        assert is_output
        return self

    def set_dim(self, dim: list[int]) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeTensor:
        self.stride = stride
        return self

    def set_ragged_offset(self, offsets: FakeTensor) -> FakeTensor:
        self.offsets = offsets
        return self


class FakeGraph:
    def __init__(self, frontend: FakeCudnn, **types: Any) -> None:
        assert types["intermediate_data_type"] == types["compute_data_type"] == "FLOAT"
        self._frontend, self._options = frontend, {}

    def tensor(self, **fields: Any) -> FakeTensor:
        assert len(fields["dim"]) == len(fields["stride"]) == 4
        return FakeTensor(**fields)

    def sdpa(self, **options: Any) -> tuple[FakeTensor, None]:
        assert options["use_causal_mask_bottom_right"]
        assert options["use_padding_mask"]
        assert not options["generate_stats"]
        self._options, self._out = options, FakeTensor("out")
        return self._out, None

    def build(self, modes: list[str]) -> None:
        self._frontend.num_built += 1
        if self._frontend.error is not None:
            raise self._frontend.error
        block_size = self._options["k"].dim[2]
        num_blocks = self._options["paged_attention_k_table"].dim[2]
        most = self._options["paged_attention_max_seq_len_kv"]
        assert num_blocks == -(-most // block_size)  # as the frontend checks

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, given: dict[FakeTensor, Tensor], workspace: Tensor, *, handle: Any) -> None:
        assert handle == "handle"
        options = self._options
        for tensor, value in given.items():
            if tensor.data_type == "INT32":
                assert value.dtype == torch.int32, tensor.name
                assert list(value.shape) == tensor.dim, tensor.name
        names = "q", "k", "v", "seq_len_q", "seq_len_kv", "paged_attention_k_table"
        query, keys, values, query_lens, lens, pages = (given[options[each]] for each in names)
        offsets = given[options["q"].offsets]
        assert self._out.offsets is options["q"].offsets
        assert list(keys.shape) == options["k"].dim
        for index in range(options["q"].dim[0]):
            count, end = int(query_lens[index]), int(lens[index])
            assert count <= options["q"].dim[2]
            table = pages[index, 0, : -(-end // keys.shape[2]), 0]
            first = int(offsets[index]) // query[0].numel()
            for token in range(count):
                row = first + token
                seen = end - count + token + 1  # from the bottom right
                given[self._out][row] = attended(
                    query[row], keys[table], values[table], seen, options["attn_scale"]
                )


def attended(query: Tensor, keys: Tensor, values: Tensor, seen: int, scale: float) -> Tensor:
    """query [H, D]; keys and values [blocks, kv_heads, block, D] -> [H, D]."""
    found = []
    group = len(query) // keys.shape[1]
    for head, row in enumerate(query.float()):
        own = [each[:, head // group].flatten(0, 1)[:seen].float() for each in (keys, values)]
        found.append((own[0] @ row * scale).softmax(0) @ own[1])
    return torch.stack(found).to(query.dtype)


class FakeCudnn:
    data_type = SimpleNamespace(BFLOAT16="BFLOAT16", HALF="HALF", FLOAT="FLOAT", INT32="INT32")
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")

    def __init__(self) -> None:
        self.num_built = 0
        self.error: Exception | None = None  # raised by each build

    def create_handle(self) -> str:
        return "handle"

    def pygraph(self, *, handle: str, **types: Any) -> FakeGraph:
        return FakeGraph(self, **types)
