"""CPU time of stop strings for a character of text, on texts that steer the automaton.

Run: python -m benchmarks.stop_strings [--characters 200000] [--out FILE]

Each case feeds tokens of four characters, as a choice of a request receives them. `few` is usual:
three short stop strings that do not occur. `costly` has as many and as long ones as a request may
have (16 of 256 characters), and the model is steered to text that is the start of many of them, so
that every comparison of texts would be long. `parting` completes a string but for its last
character, again and again. Bar: 2 us a character in every case. `build ms` is CPU time once a
request.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.report import Row, at_most, write_result
from services.gateway.request.sampling import MAX_STOP_STRINGS, MAX_STRING_CHARS
from services.gateway.text.stop_strings import StopAutomaton, StopStrings

TOKEN_CHARS = 4
BAR_US = 2.0
FEW = ("\nUser:", "END", "</answer>")
RUN = "a" * (MAX_STRING_CHARS - 1)
COSTLY = (*(f"{chr(ord('b') + i)} {RUN[1:]}" for i in range(MAX_STOP_STRINGS - 1)), RUN + "!")
PROSE = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "
CASES = {
    "none": ((), PROSE),
    "few": (FEW, PROSE),
    "costly": (COSTLY, "a"),
    "parting": (COSTLY, RUN + "?"),
}


def tokens(text: str, num_characters: int, token_chars: int) -> list[str]:
    long = text * (num_characters // len(text) + 1)
    return [long[at : at + token_chars] for at in range(0, num_characters, token_chars)]


def measure(name: str, num_characters: int, token_chars: int = TOKEN_CHARS) -> Row:
    stops, text = CASES[name]
    began = time.process_time()
    automaton = StopAutomaton(stops)
    build_s = time.process_time() - began
    strings, pieces = StopStrings(automaton), tokens(text, num_characters, token_chars)
    began = time.process_time()
    for piece in pieces:
        strings.feed(piece)
    took_s = time.process_time() - began
    assert strings.matched is None, "the text must not contain a stop string"
    return {
        "case": name,
        "us a character": took_s / num_characters * 1e6,
        "us a token": took_s / len(pieces) * 1e6,
        "build ms": build_s * 1e3,
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--characters", type=int, default=200_000, metavar="N", help="per case")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to this file")
    given = parser.parse_args(argv)
    rows = [measure(name, given.characters) for name in CASES]
    bars = [
        at_most(f"{row['case']}: CPU time of a character", row["us a character"], BAR_US, "us")
        for row in rows
    ]
    result = write_result("stop_strings", rows, bars, ["-m", "benchmarks.stop_strings", *argv])
    if given.out is not None:
        given.out.write_bytes(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
