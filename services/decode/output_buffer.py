"""What has been drawn and not yet been acknowledged, by placement and choice. Pure.

Tokens are numbered by their position in the output, over all tries of a request. They are kept
until the gateway has acknowledged the ending, so that any gap can be filled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import UnknownPlacement
from shared.messages import Finish, Served, TokenEntry, TokenLogprobs


@dataclass(slots=True, eq=False)
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
    is_dropped: bool = False

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


class OutputBuffer:
    def __init__(self) -> None:
        self._outputs: dict[bytes, dict[int, Output]] = {}
        self._news: dict[Output, None] = {}
        self._first: dict[Output, None] = {}  # of these, the ones of which no token was told yet

    def __contains__(self, placement_id: bytes) -> bool:
        return placement_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def num_waiting(self) -> int:
        """Entries that `take` would give."""
        return len(self._news)

    def open(
        self, placement_id: bytes, gateway_id: str, choice_index: int, first_position: int
    ) -> Output:
        outputs = self._outputs.setdefault(placement_id, {})
        output = Output(placement_id, gateway_id, choice_index, first_position)
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
        """The `prompt_logprobs` of the first tokens are kept. Ignored for what was dropped."""
        if output.is_dropped:
            return
        output.token_ids += token_ids
        output.finish = finish
        output.logprobs += logprobs
        if prompt_logprobs and not output.prompt_logprobs:
            output.prompt_logprobs = prompt_logprobs
        self._news[output] = None
        if not output.num_emitted:
            self._first[output] = None

    def resend_overdue(self, placement_id: bytes) -> None:
        """The next `take` names all its choices, with their endings, without tokens told before."""
        self._news |= dict.fromkeys(self._outputs.get(placement_id, {}).values())

    def take(self) -> dict[str, list[TokenEntry]]:
        """What is new since the last call, by gateway: one message for each."""
        taken, self._news = self._news, {}
        self._first.clear()
        return _by_gateway(taken)

    def take_first(self) -> dict[str, list[TokenEntry]]:
        """As `take`, of those alone of which no token was told yet."""
        taken, self._first = self._first, {}
        for output in taken:
            del self._news[output]
        return _by_gateway(taken)

    def resend(self, placement_id: bytes, choice_index: int, from_position: int) -> TokenEntry:
        """Raises UnknownPlacement if it is not, or no longer, held here."""
        output = self._output(placement_id, choice_index)
        if output is None:
            raise UnknownPlacement("this worker does not hold that placement")
        output.num_emitted = len(output.token_ids)
        self._forget_news(output)
        return output.entry_from(from_position)

    def drop(self, placement_id: bytes) -> None:
        """Acknowledged, aborted or orphaned: all choices. Idempotent."""
        for choice_index in list(self._outputs.get(placement_id, ())):
            self.drop_choice(placement_id, choice_index)

    def drop_choice(self, placement_id: bytes, choice_index: int) -> None:
        """Nobody wants it any more; with its last choice the placement goes. Idempotent."""
        outputs = self._outputs.get(placement_id, {})
        output = outputs.pop(choice_index, None)
        if output is not None:
            output.is_dropped = True
            self._forget_news(output)
        if not outputs:
            self._outputs.pop(placement_id, None)

    def _forget_news(self, output: Output) -> None:
        self._news.pop(output, None)
        self._first.pop(output, None)

    def _output(self, placement_id: bytes, choice_index: int) -> Output | None:
        outputs = self._outputs.get(placement_id)
        return None if outputs is None else outputs.get(choice_index)


def _by_gateway(outputs: Iterable[Output]) -> dict[str, list[TokenEntry]]:
    batches: dict[str, list[TokenEntry]] = {}
    for output in outputs:
        entry = output.entry_from(output.first_position + output.num_emitted)
        output.num_emitted = len(output.token_ids)
        batches.setdefault(output.gateway_id, []).append(entry)
    return batches


def apart(entries: list[TokenEntry]) -> list[list[TokenEntry]]:
    """One message for each entry with a prompt's logprobs, which are megabytes, and one for all
    others.
    """
    large = [[entry] for entry in entries if entry.prompt_logprobs]
    others = [entry for entry in entries if not entry.prompt_logprobs]
    return [*large, others] if others else large
