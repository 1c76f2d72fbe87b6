"""Attention of prompts by cuDNN, through its frontend (`nvidia-cudnn-frontend`).

It has never run on a device. Without one, release 1.22.1 with cuDNN 9.19 validates its graphs for
compute capability 9.0, and arrays are compared with a reference. So it is used on request alone,
and `probe` compares it first.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import structlog
import torch
from torch import Tensor

from shared.background import item_error
from shared.engine.layers.attention_backends.cudnn_plan import (
    PrefillArrays,
    PrefillShape,
    prefill_arrays,
)
from shared.engine.layers.attention_inputs import PrefillRows

log = structlog.get_logger(__name__)


class Library(Protocol):
    """The attention of prompts by a library."""

    failure: str  # why it computes nothing any more

    def attend(self, query: Tensor, kv_cache: Tensor, rows: PrefillRows) -> Tensor | None:
        """As `PagedAttention.attend`. Returns None if the library cannot: ours must."""
        ...


class _Graph(NamedTuple):
    graph: Any
    inputs: tuple[Any, ...]  # query, keys, values, and those of PrefillArrays
    output: Any


class CudnnPrefill:
    """The graphs of one model on the thread's device; all its layers have the same."""

    def __init__(self, cudnn: Any, scale: float) -> None:
        """`cudnn` is the frontend's module."""
        self.failure = ""  # why it computes nothing any more
        self._cudnn, self._scale = cudnn, scale
        self._handle = cudnn.create_handle()
        self._graphs: dict[tuple[PrefillShape, torch.dtype], _Graph] = {}
        self._planned: tuple[PrefillRows, PrefillArrays] | None = None  # of the last layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Models are copied to compile their kernels."""
        return self

    def attend(self, query: Tensor, kv_cache: Tensor, rows: PrefillRows) -> Tensor | None:
        if self.failure:
            return None
        try:
            return self._attend(query, kv_cache, rows)
        except BaseException as raised:  # the frontend raises its own, and RuntimeError
            error = item_error(raised)
            self.failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning("cudnn_attention_failed", reason=self.failure, used="triton")
            return None

    def _attend(self, query: Tensor, kv_cache: Tensor, rows: PrefillRows) -> Tensor:
        shape = PrefillShape.of(query, kv_cache, rows)
        key = shape, query.dtype
        built = self._graphs.get(key)
        if built is None:
            built = self._graphs[key] = self._built(shape, query.dtype)
        query, out = query.contiguous(), torch.empty_like(query)
        operands = (query, *kv_cache.unbind(0), *self._arrays(rows, shape))
        pointers = dict(zip(built.inputs, operands, strict=True)) | {built.output: out}
        num_bytes = max(1, built.graph.get_workspace_size())
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
        if query.is_cuda:
            stream = torch.cuda.current_stream(query.device).cuda_stream
            self._cudnn.set_stream(handle=self._handle, stream=stream)
        built.graph.execute(pointers, workspace, handle=self._handle)
        return out

    def _arrays(self, rows: PrefillRows, shape: PrefillShape) -> PrefillArrays:
        """Returns those of the layer before if it has the same inputs."""
        if self._planned is None or self._planned[0] is not rows:
            self._planned = rows, prefill_arrays(rows, shape)
        return self._planned[1]

    def _built(self, shape: PrefillShape, dtype: torch.dtype) -> _Graph:
        types = self._cudnn.data_type
        io = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF
        graph = self._cudnn.pygraph(
            handle=self._handle,
            io_data_type=io,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )

        def tensor(name: str, dim: list[int], stride: list[int], kind: Any = types.INT32) -> Any:
            return graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)

        num_seqs, row = shape.num_seqs, shape.num_heads * shape.head_dim
        packed = [num_seqs, shape.num_heads, shape.num_tokens, shape.head_dim]
        stride = [shape.num_tokens * row, shape.head_dim, row, 1]
        query = tensor("query", packed, stride, io)
        container = [shape.cache_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim]
        strides = _contiguous(container)
        keys, values = (tensor(name, container, strides, io) for name in ("keys", "values"))
        lens = [tensor(name, [num_seqs, 1, 1, 1], [1] * 4) for name in ("query_lens", "lens")]
        offsets = tensor("offsets", [num_seqs + 1, 1, 1, 1], [1] * 4)
        table = [num_seqs, 1, shape.num_blocks, 1]
        pages = tensor("pages", table, _contiguous(table))
        query.set_ragged_offset(offsets)
        out, _ = graph.sdpa(
            name="prefill",
            q=query,
            k=keys,
            v=values,
            generate_stats=False,
            attn_scale=self._scale,
            use_causal_mask_bottom_right=True,
            use_padding_mask=True,
            seq_len_q=lens[0],
            seq_len_kv=lens[1],
            paged_attention_k_table=pages,
            paged_attention_v_table=pages,
            paged_attention_max_seq_len_kv=shape.num_blocks * shape.block_size,
        )
        out.set_output(True).set_dim(packed).set_stride(stride)
        out.set_ragged_offset(offsets)
        modes = self._cudnn.heur_mode
        graph.build([modes.A, modes.FALLBACK])
        return _Graph(graph, (query, keys, values, *lens, offsets, pages), out)


def _contiguous(dim: list[int]) -> list[int]:
    strides = [1]
    for size in reversed(dim[1:]):
        strides.insert(0, strides[0] * size)
    return strides
