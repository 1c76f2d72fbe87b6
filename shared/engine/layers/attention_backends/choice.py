"""Chooses what computes the attention of prompts: this project's kernels unless cuDNN is asked for
and can. Decode steps are always ours, in CUDA graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from kernels.ops import prefill_attention
from shared.background import item_error
from shared.config import AttentionChoice
from shared.engine.layers.attention_backends.cudnn import CudnnPrefill
from shared.engine.layers.attention_inputs import PrefillRows
from shared.numerics import Mode

log = structlog.get_logger(__name__)

PACKAGE = "nvidia-cudnn-frontend"
LEAST, BELOW = (1, 14), (1, 23)  # releases whose interface was read
LEAST_CUDNN = 91002  # 9.10.2: packed queries; 9.10.0 and 9.10.1 have known errors
MOST_HEAD_DIM = 256
PROBED_LENS = ((40, 40), (3, 70))  # new tokens of a sequence, and its context
MAX_ERROR = 0.03  # of values around 1, in BF16


class AttentionState(NamedTuple):
    """The attention of a model's layers, and their cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    has_reach: bool  # windows or chunks, in any layer
    has_softcap: bool
    has_sinks: bool
    is_latent: bool


class CudnnFacts(NamedTuple):
    """What is installed; empty: not there. `cudnn` is as cuDNN counts, 91002 for 9.10.2."""

    frontend: str
    cudnn: int
    capability: int  # of the device: 90

    @classmethod
    def found(cls, capability: int) -> CudnnFacts:
        try:
            frontend = version(PACKAGE)
            found = int(import_module("cudnn").backend_version())
        except PackageNotFoundError:
            return cls("", 0, capability)
        except (ImportError, OSError, RuntimeError, AssertionError):  # no cuDNN, or two
            return cls(frontend, 0, capability)
        return cls(frontend, found, capability)


def reason_against_cudnn(state: AttentionState, mode: Mode, facts: CudnnFacts) -> str:
    """Returns the first of the reasons; empty: none."""
    return next((text for is_so, text in _reasons(state, mode, facts) if is_so), "")


def _reasons(state: AttentionState, mode: Mode, facts: CudnnFacts) -> list[tuple[bool, str]]:
    release = tuple(int(each) for each in re.findall(r"\d+", facts.frontend)[:2])
    return [
        (mode == "exact", "in the exact mode bits must not depend on where chunks end"),
        (state.is_latent, "it has no attention over latents"),
        (state.has_reach, "windows and chunks are not given to it"),
        (state.has_softcap, "it has no softcap"),
        (state.has_sinks, "sinks are not given to it"),
        (state.kv_dtype != state.dtype, "KV in FP8 needs queries in FP8"),
        (state.dtype not in (torch.bfloat16, torch.float16), f"it has no {state.dtype}"),
        (state.head_dim % 8 != 0, f"heads of {state.head_dim} are no multiple of 8"),
        (state.head_dim > MOST_HEAD_DIM, f"heads of {state.head_dim} exceed {MOST_HEAD_DIM}"),
        (facts.capability < 90, "packed queries need compute capability 9.0"),
        (not facts.frontend, f"{PACKAGE} is not installed: pip install '.[cuda]' in the clone"),
        (not LEAST <= release < BELOW, f"{PACKAGE} {facts.frontend} is not 1.14 to 1.22"),
        (facts.cudnn < LEAST_CUDNN, f"cuDNN {facts.cudnn} is older than {LEAST_CUDNN}"),
    ]


def choose_library(
    choice: AttentionChoice,
    state: AttentionState,
    mode: Mode,
    device: torch.device,
    find: Callable[[], CudnnFacts],
) -> CudnnPrefill | None:
    """Returns cuDNN if it is asked for, has all that the layers need, and passes the probe; logs
    the backend and the reason.
    """
    if choice != "cudnn":
        log.info("attention_backend", backend="triton", reason=f"attention is {choice}")
        return None
    library, reason = None, reason_against_cudnn(state, mode, find())
    if not reason:
        library, reason = _probed(state, device)
    if library is None:
        log.warning("attention_backend", backend="triton", reason=f"not cudnn: {reason}")
    else:
        log.info("attention_backend", backend="cudnn", reason="asked for, and the probe is right")
    return library


def _probed(state: AttentionState, device: torch.device) -> tuple[CudnnPrefill | None, str]:
    cudnn: Any = import_module("cudnn")
    try:
        library = CudnnPrefill(cudnn, state.scale)
    except BaseException as raised:  # there are many ways in which a library cannot start
        error = item_error(raised)
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]
    reason = probe(library, state, device)
    return (None, reason) if reason else (library, "")


def probe(library: CudnnPrefill, state: AttentionState, device: torch.device) -> str:
    """Compares a prompt, and a chunk after a prefix, with the kernels of this project. Returns what
    is wrong.
    """
    query, kv_cache, rows = _probe_inputs(state, device)
    found = library.attend(query, kv_cache, rows)
    if found is None:
        return library.failure
    tables = rows.block_tables, rows.cu_seqlens_q, rows.context_lens
    wanted = prefill_attention(query, kv_cache, *tables, state.scale)
    error = float((found.float() - wanted.float()).abs().max())
    return "" if error <= MAX_ERROR else f"the probe's largest error is {error:.3g}"


def _probe_inputs(
    state: AttentionState, device: torch.device
) -> tuple[Tensor, Tensor, PrefillRows]:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(state.dtype)

    query_lens, lens = zip(*PROBED_LENS, strict=True)
    width = -(-max(lens) // state.block_size)
    num_blocks = width * len(lens)
    tables = torch.arange(num_blocks, dtype=torch.int32, device=device).flip(0)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0)
    rows = PrefillRows(
        tables.view(len(lens), width), starts, torch.tensor(lens, device=device), lower=None
    )
    query = drawn(sum(query_lens), state.num_heads, state.head_dim)
    cache = drawn(2, num_blocks, state.num_kv_heads, state.block_size, state.head_dim)
    return query, cache, rows
