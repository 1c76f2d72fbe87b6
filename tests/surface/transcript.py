"""Writes an answer so that two of the same gateway are equal: without times, with ids by order."""

from __future__ import annotations

import re
from collections.abc import Mapping

# by their starts
VARYING = ("date", "x-request-id", "openai-processing-ms", "content-length", "hearth-request")
_HEX_ID = re.compile(r"\b((?:[a-z]+[-_])*)[0-9a-f]{16,36}(i\d{4})?\b")
_TIMES = "created|created_at|started_at|completed_at|expires_at|p"
_TIME = re.compile(rf'("(?:{_TIMES})": ?)(?:\d[\d.]*|"[^"]*")')
_SECONDS = re.compile(r'("[a-z_]+_(?:s|ms)": ?)[\d.e-]+')
_SIGNED = re.compile(r'"eyJ[\w-]+\.[\w-]+\.[\w-]+"')
_KEY = re.compile(r'("(?:hash|kid|salt|x)": ?")[\w-]{22,43}"')
_RECEIPT = re.compile(r"(receipt:? )[A-Za-z0-9_-]{43}")
_WORKER = re.compile(r"decode-\d")


def answer_text(headers: Mapping[str, str], body: str, names: dict[str, str]) -> str:
    """`names`: of the ids so far."""
    lines = []
    for name, value in sorted((name.lower(), value) for name, value in headers.items()):
        if not name.startswith(VARYING):
            ordered = ", ".join(sorted(value.split(", "))) if name == "allow" else value
            lines.append(f"{name}: {ordered}")
    return _fixed("\n".join([*lines, "", body]), names)


def _fixed(text: str, names: dict[str, str]) -> str:
    def named(match: re.Match[str]) -> str:
        start, end = match.groups(default="")
        return names.setdefault(match.group(), f"{start}id{len(names)}{end}")

    text = _TIME.sub(r"\g<1>0", _SECONDS.sub(r"\g<1>0", text))  # long fractions look like ids
    text = _KEY.sub(r'\g<1>random"', _SIGNED.sub('"signed"', text))
    text = _RECEIPT.sub(r"\g<1>hash", _HEX_ID.sub(named, text))
    return _WORKER.sub("decode-n", text)
