"""A secret that an operator replaces while processes run, without a moment in which two disagree.

Each line of its text is a value: the first is used, all are accepted. A rotation adds the new value
below the old one, in every process; then puts it first; and takes the old one out once nothing that
was made with it is needed any more.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.secrets.option_files import OptionFile

T = TypeVar("T")


class Secret:
    """`text`: the value of its option, as long as it is not read from `file`."""

    def __init__(self, text: str, file: OptionFile | None = None) -> None:
        self._text = text
        self._file = file
        self._split_of = ""
        self._values: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[str, ...]:
        """Returns all values, the one in use first; none without a secret."""
        text = self._text if self._file is None else self._file.text
        if text != self._split_of:
            lines = (each.strip() for each in text.splitlines())
            self._split_of, self._values = text, tuple(each for each in lines if each)
        return self._values

    @property
    def current(self) -> str:
        """Returns the value in use; empty without a secret."""
        return next(iter(self.accepted), "")

    def matches(self, given: str) -> bool:
        """Whether `given` is one of the values, in a time that does not depend on which."""
        found = [hmac.compare_digest(given.encode(), each.encode()) for each in self.accepted]
        return any(found)


class Derived(Generic[T]):
    """What `make` returns for each value of a secret. It is called once for a value."""

    def __init__(self, secret: Secret, make: Callable[[str], T]) -> None:
        self._secret = secret
        self._make = make
        self._made: dict[str, T] = {}

    @property
    def accepted(self) -> tuple[T, ...]:
        """Returns that of all values, the one in use first; none without a secret."""
        values = self._secret.accepted
        if values != (*self._made,):
            made = self._made
            self._made = {e: made[e] if e in made else self._make(e) for e in values}
        return (*self._made.values(),)

    @property
    def current(self) -> T | None:
        """Returns that of the value in use; None without a secret."""
        return next(iter(self.accepted), None)
