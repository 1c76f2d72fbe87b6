"""Cuts a layer's experts to the part that one rank of a stage holds. No torch.

    ep   whole experts, contiguous ids: a rank computes the rows of its own, and all gather the rows
         of all; k rows of the model's dtype for each token
    tp   all experts, each with some of its inner columns, cut at the borders of the sum lanes: k
         rows of FP32 sums for each token

The shared expert is cut by its columns in both.
"""

from __future__ import annotations

from shared.config import ExpertSplit
from shared.engine.model_config.moe_config import ExpertPart, MoeConfig
from shared.engine.parallel.cuts import Range, column_lanes, rank_range, whole_blocks
from shared.errors import ConfigError

EXPERTS_PER_RANK = 8  # so many experts spread tokens evenly enough over ranks


def split_of(moe: MoeConfig, tp_size: int, asked: ExpertSplit) -> ExpertSplit:
    """Returns "ep" or "tp"."""
    if asked != "auto":
        return asked
    has_columns = all(_has_columns(moe.intermediate_size, rank, tp_size) for rank in range(tp_size))
    is_ep = moe.num_experts >= EXPERTS_PER_RANK * tp_size
    return "ep" if is_ep or not has_columns else "tp"


def expert_part(moe: MoeConfig, tp_rank: int, tp_size: int, asked: ExpertSplit) -> ExpertPart:
    """Returns a rank's part of the experts. Raises ConfigError if the experts cannot
    be cut like this.
    """
    experts, columns = (0, moe.num_experts), (0, moe.intermediate_size)
    if split_of(moe, tp_size, asked) == "ep":
        experts = expert_range(moe.num_experts, tp_rank, tp_size)
        if experts[0] == experts[1]:
            raise ConfigError(
                f"{moe.num_experts} experts are too few for {tp_size} ranks", param="experts"
            )
    else:
        columns = _columns("each expert", moe.intermediate_size, tp_rank, tp_size)
    shared = (0, 0)
    if moe.shared_intermediate_size:
        shared = _columns("the shared expert", moe.shared_intermediate_size, tp_rank, tp_size)
    return ExpertPart(experts=experts, columns=columns, shared=shared)


def expert_range(num_experts: int, tp_rank: int, tp_size: int) -> Range:
    """Returns the experts of a rank: contiguous, and equally many but for one."""
    return num_experts * tp_rank // tp_size, num_experts * (tp_rank + 1) // tp_size


def _columns(name: str, width: int, tp_rank: int, tp_size: int) -> Range:
    if not _has_columns(width, tp_rank, tp_size):
        raise ConfigError(
            f"the {width} columns of {name} are too few for {tp_size} ranks", param="experts"
        )
    first, end = rank_range(column_lanes(whole_blocks(width)), tp_rank, tp_size)
    return first, min(end, width)


def _has_columns(width: int, tp_rank: int, tp_size: int) -> bool:
    first, end = rank_range(column_lanes(whole_blocks(width)), tp_rank, tp_size)
    return end > first
