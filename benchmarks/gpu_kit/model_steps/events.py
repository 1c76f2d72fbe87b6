"""Events on the device between the stages of a model's eager steps: forward, head, draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shared.engine.models.decoder import Decoder

STAGES = ("forward", "head", "draw")


class StepEvents:
    """Watches the plain greedy steps of a model that runs on CUDA. A step's events are its own: its
    times may be read once its token ids were.
    """

    def __init__(self, model: Decoder) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(len(STAGES) + 1)]
        start, *ends = [partial(_record, each) for each in self._events]
        _before(model, "embed", start)
        _after(model, "run_layers", ends[0])
        _after(model.lm_head.method, "logits", ends[1])
        _after(model, "argmax_tokens", ends[2])

    def milliseconds(self) -> dict[str, float]:
        """Returns the milliseconds of the last step, by stage."""
        spans = zip(STAGES, self._events, self._events[1:], strict=False)
        return {stage: begin.elapsed_time(end) for stage, begin, end in spans}


def _record(event: torch.cuda.Event) -> None:
    """A graph would record it at each replay, without its time."""
    if not torch.cuda.is_current_stream_capturing():
        event.record()


def _before(owner: Any, name: str, record: Callable[[], object]) -> None:
    call = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        record()
        return call(*args, **kwargs)

    setattr(owner, name, recorded)


def _after(owner: Any, name: str, record: Callable[[], object]) -> None:
    call = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        record()
        return result

    setattr(owner, name, recorded)
