"""The commands in a block of shell code, without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?([^\n]*)\n.*?^\1$", re.MULTILINE | re.DOTALL)
_NESTED = re.compile(r"\$\(((?:[^()]|\([^()]*\))*)\)")
_COMMENT = re.compile(r"(?:^|\s)# [^\n]*", re.MULTILINE)
_SEPARATORS = ";|&()\n"
NAMES_FOLDERS = ("cd", "git")  # programs whose arguments may have a program's name


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each simple command, also of those in `$(…)`. Raises ValueError for an
    open quote.
    """
    text = _COMMENT.sub("", _HEREDOC.sub(r"\2", text)).replace("\\\n", " ")
    for nested in _NESTED.findall(text):
        yield from simple_commands(nested)
    lexer = shlex.shlex(_NESTED.sub("NESTED", text), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " \t\r", ""
    words: list[str] = []
    for token in lexer:
        if set(token) <= set(_SEPARATORS):
            yield from filter(None, [words])
            words = []
        else:
            words.append(token)
    yield from filter(None, [words])


def arguments_of(program: str, words: list[str]) -> list[str] | None:
    """Returns the arguments of a program in a simple command, which variables or another program
    may precede; None if it does not run the program. Redirections are left out.
    """
    runs = [each == program or each.endswith(f"bin/{program}") for each in words]
    if not any(runs) or words[0] in NAMES_FOLDERS:
        return None
    found = words[runs.index(True) + 1 :]
    redirects = [n for n, each in enumerate(found) if re.fullmatch(r"\d?[<>]+", each)]
    skipped = {*redirects, *(each + 1 for each in redirects)}
    return [
        each
        for n, each in enumerate(found)
        if n not in skipped and not re.match(r"\d?[<>]+\S", each)
    ]
