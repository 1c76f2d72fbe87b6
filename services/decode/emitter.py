"""What has been drawn and not yet been acknowledged, by placement and choice. Pure.

Tokens are numbered by their position in the output, over all tries of a request. They are kept
until the gateway has acknowledged the ending, so that any gap can be filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import UnknownPlacement
from shared.messages import Finish, Served, TokenEntry, TokenLogprobs


@dataclass(slots=True)
class Output:
    placement_id: bytes
    gateway_id: str
    choice_index: int
    first_position: int
    token_ids: list[int] = field(default_factory=list)
    num_emitted: int = 0
    finish: Finish | None = None
    served: Served | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

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
            logprobs=tuple(self.logprobs[start - self.first_position :]),
            prompt_logprobs=self.prompt_logprobs if is_first else (),
        )


class Emitter:
    def __init__(self) -> None:
        self._outputs: dict[bytes, dict[int, Output]] = {}
        self._dirty: dict[tuple[bytes, int], Output] = {}

    def __contains__(self, placement_id: bytes) -> bool:
        return placement_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def open(
        self, placement_id: bytes, gateway_id: str, choice_index: int, first_position: int
    ) -> None:
        outputs = self._outputs.setdefault(placement_id, {})
        outputs[choice_index] = Output(placement_id, gateway_id, choice_index, first_position)

    def is_silent(self, placement_id: bytes, choice_index: int) -> bool:
        """Nothing of it was added: who serves it is to be said with what comes first."""
        output = self._output(placement_id, choice_index)
        return output is not None and output.served is None

    def add(
        self,
        placement_id: bytes,
        choice_index: int,
        token_ids: tuple[int, ...],
        finish: Finish | None = None,
        served: Served | None = None,
        *,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """The `served` and `prompt_logprobs` of the first tokens are kept. Ignored for what was
        dropped.
        """
        output = self._output(placement_id, choice_index)
        if output is None:
            return
        output.token_ids += token_ids
        output.finish = finish
        output.logprobs += logprobs
        output.served = output.served or served
        output.prompt_logprobs = output.prompt_logprobs or prompt_logprobs
        self._dirty[placement_id, choice_index] = output

    def tell_again(self, placement_id: bytes) -> None:
        """The next `take` names all its choices, with their endings, without tokens told before."""
        for choice_index, output in self._outputs.get(placement_id, {}).items():
            self._dirty[placement_id, choice_index] = output

    def take(self) -> dict[str, list[TokenEntry]]:
        """What is new since the last call, by gateway: one message for each."""
        batches: dict[str, list[TokenEntry]] = {}
        for output in self._dirty.values():
            entry = output.entry_from(output.first_position + output.num_emitted)
            output.num_emitted = len(output.token_ids)
            batches.setdefault(output.gateway_id, []).append(entry)
        self._dirty.clear()
        return batches

    def resend(self, placement_id: bytes, choice_index: int, from_position: int) -> TokenEntry:
        """Raises UnknownPlacement if it is not, or no longer, held here."""
        output = self._output(placement_id, choice_index)
        if output is None:
            raise UnknownPlacement("this worker does not hold that placement")
        output.num_emitted = len(output.token_ids)
        self._dirty.pop((placement_id, choice_index), None)
        return output.entry_from(from_position)

    def drop(self, placement_id: bytes) -> None:
        """Acknowledged, aborted or orphaned: all choices. Idempotent."""
        for choice_index in list(self._outputs.get(placement_id, ())):
            self.drop_choice(placement_id, choice_index)

    def drop_choice(self, placement_id: bytes, choice_index: int) -> None:
        """Nobody wants it any more; with its last choice the placement goes. Idempotent."""
        outputs = self._outputs.get(placement_id, {})
        outputs.pop(choice_index, None)
        self._dirty.pop((placement_id, choice_index), None)
        if not outputs:
            self._outputs.pop(placement_id, None)

    def _output(self, placement_id: bytes, choice_index: int) -> Output | None:
        outputs = self._outputs.get(placement_id)
        return None if outputs is None else outputs.get(choice_index)


def apart(entries: list[TokenEntry]) -> list[list[TokenEntry]]:
    """One message for each entry with a prompt's logprobs, which are megabytes, and one for all
    others.
    """
    large = [[entry] for entry in entries if entry.prompt_logprobs]
    others = [entry for entry in entries if not entry.prompt_logprobs]
    return [*large, others] if others else large
