"""Buffers sampled tokens until their gateway acknowledges them, by placement and choice. No I/O.

Tokens are numbered by their position in the output, over all attempts of a request. The buffer
retains tokens until the gateway has acknowledged the finish, so that any gap can be resent. Their
logprobs are packed; a worker rejects requests for more than MAX_LOGPROB_BYTES of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import UnknownPlacement
from shared.messages import Finish, Served, TokenEntry, TokenLogprobs
from shared.output.packed_logprobs import PackedLogprobs

# Entries by gateway and region class of their tenants, which is part of the subject
Batches = dict[tuple[str, str], list[TokenEntry]]


@dataclass(slots=True, eq=False)
class Output:
    placement_id: bytes
    gateway_id: str
    region_class: str
    choice_index: int
    first_position: int
    token_ids: list[int] = field(default_factory=list)
    num_emitted: int = 0
    finish: Finish | None = None
    served: Served | None = None
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    prompt_logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    is_dropped: bool = False
    is_waiting: bool = False  # when it was sent again last

    def entry_from(self, position: int) -> TokenEntry:
        start = max(position, self.first_position)
        is_first = start == self.first_position
        return TokenEntry(
            placement_id=self.placement_id,
            choice_index=self.choice_index,
            first_position=start,
            token_ids=tuple(self.token_ids[start - self.first_position :]),
            finish=self.finish,
            served=self.served if is_first else None,
            logprobs=tuple(self.logprobs[start - self.first_position :]) if self.logprobs else (),
            prompt_logprobs=tuple(self.prompt_logprobs) if is_first else (),
            is_waiting=self.is_waiting,
        )


class OutputBuffer:
    def __init__(self) -> None:
        self._outputs: dict[bytes, dict[int, Output]] = {}
        self._updates: dict[Output, None] = {}
        self._first: dict[Output, None] = {}  # the ones of `_updates` without a sent token

    def __contains__(self, placement_id: bytes) -> bool:
        return placement_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def num_waiting(self) -> int:
        """The number of entries that `take` would return."""
        return len(self._updates)

    def open(
        self,
        placement_id: bytes,
        gateway_id: str,
        choice_index: int,
        first_position: int,
        region_class: str = "",
    ) -> Output:
        outputs = self._outputs.setdefault(placement_id, {})
        output = Output(placement_id, gateway_id, region_class, choice_index, first_position)
        outputs[choice_index] = output
        return output

    def add(
        self,
        output: Output,
        token_ids: tuple[int, ...],
        finish: Finish | None = None,
        *,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Adds an update to an output, but only the first non-empty `prompt_logprobs`. Ignores a
        dropped output.
        """
        if output.is_dropped:
            return
        output.token_ids += token_ids
        output.finish = finish
        output.is_waiting = False
        if logprobs:
            output.logprobs.extend(logprobs)
        if prompt_logprobs and not output.prompt_logprobs:
            output.prompt_logprobs.extend(prompt_logprobs)
        self._updates[output] = None
        if not output.num_emitted:
            self._first[output] = None

    def resend_overdue(self, placement_id: bytes, *, is_waiting: bool = False) -> None:
        """Makes the next `take` return all choices of the placement: their finish, but no
        tokens sent before. `is_waiting`: it waits for room.
        """
        for output in self._outputs.get(placement_id, {}).values():
            output.is_waiting = is_waiting
            self._updates[output] = None

    def take(self) -> Batches:
        """Returns the updates since the last call: one message for each receiver."""
        taken, self._updates = self._updates, {}
        self._first.clear()
        return _by_receiver(taken)

    def take_first(self) -> Batches:
        """Returns and removes the entries of outputs that have not sent a token yet."""
        taken, self._first = self._first, {}
        for output in taken:
            del self._updates[output]
        return _by_receiver(taken)

    def resend(
        self,
        placement_id: bytes,
        choice_index: int,
        from_position: int,
        region_class: str = "",
        *,
        is_waiting: bool = False,
    ) -> TokenEntry:
        """Returns the output from `from_position` on. `is_waiting`: its placement waits for room.

        Raises UnknownPlacement if this buffer does not, or no longer, hold it, or if it is of
        another region class.
        """
        output = self._output(placement_id, choice_index)
        if output is None or output.region_class != region_class:
            raise UnknownPlacement("this worker does not hold that placement")
        output.num_emitted, output.is_waiting = len(output.token_ids), is_waiting
        self._forget_updates(output)
        return output.entry_from(from_position)

    def drop(self, placement_id: bytes) -> None:
        """Drops all choices of an acknowledged, aborted or orphaned placement. Idempotent."""
        for choice_index in list(self._outputs.get(placement_id, ())):
            self.drop_choice(placement_id, choice_index)

    def drop_choice(self, placement_id: bytes, choice_index: int) -> None:
        """Drops a choice; dropping the last choice drops the placement. Idempotent."""
        outputs = self._outputs.get(placement_id, {})
        output = outputs.pop(choice_index, None)
        if output is not None:
            output.is_dropped = True
            self._forget_updates(output)
        if not outputs:
            self._outputs.pop(placement_id, None)

    def _forget_updates(self, output: Output) -> None:
        self._updates.pop(output, None)
        self._first.pop(output, None)

    def _output(self, placement_id: bytes, choice_index: int) -> Output | None:
        outputs = self._outputs.get(placement_id)
        return None if outputs is None else outputs.get(choice_index)


def _by_receiver(outputs: Iterable[Output]) -> Batches:
    batches: Batches = {}
    for output in outputs:
        entry = output.entry_from(output.first_position + output.num_emitted)
        output.num_emitted = len(output.token_ids)
        batches.setdefault((output.gateway_id, output.region_class), []).append(entry)
    return batches


def apart(entries: list[TokenEntry]) -> list[list[TokenEntry]]:
    """Splits off one message for each entry with prompt logprobs, which take megabytes; all other
    entries share one message.
    """
    large = [[entry] for entry in entries if entry.prompt_logprobs]
    others = [entry for entry in entries if not entry.prompt_logprobs]
    return [*large, others] if others else large
