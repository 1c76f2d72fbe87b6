"""Opens the dialects of one gateway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.gateway.dialects.dialect import Answers, Dialect, DialectParts, OpenDialect
from services.gateway.request.endpoint import EndpointState


class OpenDialects:
    """`declared`: the dialects in the order of the table. `opened`: the same dialects with their
    state. `answers`, `states`: by the names of their endpoints.
    """

    def __init__(self, dialects: Sequence[Dialect], parts: DialectParts) -> None:
        self.declared = tuple(dialects)
        self.opened = tuple(each.open(parts) for each in dialects)
        self.answers: Answers = {
            name: answer for each in self.opened for name, answer in each.answers.items()
        }
        self.states: dict[str, EndpointState] = {
            name: state for each in self.opened for name, state in each.states.items()
        }

    def __iter__(self) -> Iterator[tuple[Dialect, OpenDialect]]:
        return zip(self.declared, self.opened, strict=True)

    @property
    def default(self) -> Dialect:
        """The dialect of paths that no dialect owns."""
        return self.declared[0]

    def of_path(self, path: str) -> Dialect:
        """Returns the dialect in whose form the errors of an HTTP path are."""
        return dialect_of(path, self.declared)

    async def stop(self) -> None:
        for each in self.opened:
            await each.stop()


def dialect_of(path: str, dialects: Sequence[Dialect]) -> Dialect:
    """Returns the dialect that owns an HTTP path, or the first."""
    return next((each for each in dialects if each.owns(path)), dialects[0])
