"""Finds stop strings in a text that arrives in pieces, with one automaton for all of them.

The match that *completes* first wins; of matches that complete together, the longest. The result
does not depend on the piece boundaries. Neither text from the start of a match on nor a tail that
may become a match is returned.

The automaton is that of Aho and Corasick (Efficient string matching, CACM 18(6), 1975): a state is
the longest end of the text that is the start of a stop string, so its depth is the length of the
tail to hold back. A character takes one transition, and one more for each fallback to a shorter
start. A fallback undoes at least one earlier character: n characters take at most 2n transitions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat

ROOT = 0
NO_MATCH = -1


class StopAutomaton:
    """The states of a request's stop strings; all choices of the request share it.

    The strings must have 1 to 65,535 characters. The states that a string adds are numbered
    consecutively, so the string itself has the transitions between them; `_branches` has the
    others. A state takes 10 bytes; as a dict, 4,096 of them would take 1 MiB.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._paths = (*self.strings, "")
        self._branches: dict[tuple[int, str], int] = {}
        self._fallback = array("I", [ROOT])
        self._depth = array("H", [0])
        self._owner = array("H", [len(strings)])  # the path that the state is a start of
        self._match = array("h", [NO_MATCH])  # the longest string that is an end of the state
        for owner, string in enumerate(self.strings):
            self._add(owner, string)
        for state, parent, character in self._by_depth():
            self._link(state, parent, character)

    def depth(self, state: int) -> int:
        """Returns the length of the state's text."""
        return self._depth[state]

    def text(self, state: int) -> str:
        return self._paths[self._owner[state]][: self._depth[state]]

    def match(self, state: int) -> str | None:
        """Returns the longest stop string that ends in this state."""
        index = self._match[state]
        return None if index == NO_MATCH else self.strings[index]

    def run(self, state: int, text: str) -> tuple[int, int]:
        """Returns the state after the first match, else after the text, and the number of
        characters read.
        """
        matches, fallback, follow = self._match, self._fallback, self.follow
        for num_read, character in enumerate(text, 1):
            after = follow(state, character)
            while after == ROOT and state != ROOT:
                state = fallback[state]
                after = follow(state, character)
            state = after
            if matches[state] != NO_MATCH:
                return state, num_read
        return state, len(text)

    def follow(self, state: int, character: str) -> int:
        """Returns the state longer by this character, or ROOT if there is none."""
        depth, path = self._depth[state], self._paths[self._owner[state]]
        if depth < len(path) and path[depth] == character:
            return state + 1
        return self._branches.get((state, character), ROOT)

    def _add(self, owner: int, string: str) -> None:
        state, depth = ROOT, 0
        while depth < len(string):
            after = self.follow(state, string[depth])
            if after == ROOT:
                state = self._add_path(state, owner, depth)
                break
            state, depth = after, depth + 1
        if self._match[state] == NO_MATCH:
            self._match[state] = owner

    def _add_path(self, state: int, owner: int, depth: int) -> int:
        """Adds the states of the string from `depth` on, after `state`. Returns the last one."""
        string = self.strings[owner]
        self._branches[state, string[depth]] = len(self._depth)
        num_added = len(string) - depth
        self._depth.extend(range(depth + 1, len(string) + 1))
        self._owner.extend(repeat(owner, num_added))
        self._fallback.extend(repeat(ROOT, num_added))
        self._match.extend(repeat(NO_MATCH, num_added))
        return len(self._depth) - 1

    def _by_depth(self) -> Iterator[tuple[int, int, str]]:
        """Yields every state with its parent and last character, short ones first; a state that
        several strings share occurs for each.
        """
        states = dict.fromkeys(range(len(self.strings)), ROOT)
        for depth in range(max(map(len, self.strings), default=0)):
            for owner in [owner for owner in states if depth < len(self.strings[owner])]:
                parent, character = states[owner], self.strings[owner][depth]
                states[owner] = self.follow(parent, character)
                yield states[owner], parent, character

    def _link(self, state: int, parent: int, character: str) -> None:
        shorter = ROOT
        while parent != ROOT and shorter == ROOT:
            parent = self._fallback[parent]
            shorter = self.follow(parent, character)
        self._fallback[state] = shorter
        if self._match[state] == NO_MATCH:
            self._match[state] = self._match[shorter]


class StopStrings:
    """Takes the text of one choice and returns the part that is safe to show."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = ROOT
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that can no longer be part of a match; nothing after a match."""
        if self.matched is not None or not text:
            return ""
        automaton, held = self._automaton, self._state
        if not automaton.strings:
            return text
        self._state, num_read = automaton.run(held, text)
        self.matched = automaton.match(self._state)
        num_kept = automaton.depth(self._state) if self.matched is None else len(self.matched)
        num_held = automaton.depth(held)
        num_shown = num_held + num_read - num_kept
        if num_shown <= num_held:
            return automaton.text(held)[:num_shown]
        return automaton.text(held) + text[: num_shown - num_held]

    def flush(self) -> str:
        """Returns the buffered tail at the end of the text; empty after a match."""
        held, self._state = self._state, ROOT
        return "" if self.matched is not None else self._automaton.text(held)
