"""The ranks of a group, and the loss of one. It needs no torch, as a leader may have none."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import TP_SIZES

WAIT_S = 30.0  # the longest that a rank waits for another
ALL_GATHER_BYTES = 256 * 1024  # limit of a sum in FP32: larger ones are halved, not gathered


class RankLost(RuntimeError):
    """A rank does not answer, or its connection failed. `rank` is None where it is unknown."""

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(f"{'a rank' if rank is None else f'rank {rank}'} is lost: {reason}")
        self.rank = rank


@dataclass(frozen=True)
class MeshShape:
    """The shape of a group: `tp` ranks for each of `pp` stages. Rank = stage * tp + tp_rank. Raises
    ValueError.
    """

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp not in TP_SIZES:
            raise ValueError(f"tensor parallel size {self.tp}: it must be 1, 2, 4 or 8")
        if self.pp < 1:
            raise ValueError(f"pipeline parallel size {self.pp}: it must be at least 1")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def answering_rank(self) -> int:
        """The first rank of the last stage, which has the logits."""
        return (self.pp - 1) * self.tp

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the (stage, tp_rank) of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in [0, {self.num_ranks})")
        return divmod(rank, self.tp)

    def rank_of(self, stage: int, tp_rank: int) -> int:
        if not (0 <= stage < self.pp and 0 <= tp_rank < self.tp):
            raise ValueError(f"stage {stage}, tensor rank {tp_rank} is not in {self}")
        return stage * self.tp + tp_rank

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Returns the ranks of one stage, in the order of their lanes."""
        return tuple(self.rank_of(stage, tp_rank) for tp_rank in range(self.tp))
