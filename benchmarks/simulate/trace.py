"""Requests over time, in the form of the Mooncake traces.

A trace is a file of JSON lines with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`: one number for each 512 tokens of the prompt, equal if all tokens up to there are equal.
(Qin et al., "Mooncake", 2024; github.com/kvcache-ai/Mooncake.) Three more keys are optional:
`tenant`, `session`, and `final_hash_ids`, which also cover the full blocks of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512


class TraceRequest(msgspec.Struct, omit_defaults=True):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]
    tenant: str = "tenant"
    session: str = ""
    final_hash_ids: list[int] | None = None

    @property
    def at_s(self) -> float:
        return self.timestamp / 1e3

    @property
    def kept_hash_ids(self) -> list[int]:
        """The blocks that decode has at the end."""
        return self.hash_ids if self.final_hash_ids is None else self.final_hash_ids


_decoder = msgspec.json.Decoder(TraceRequest)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Reads a trace. Raises ValueError with the line number of a request that is invalid or
    goes back in time.
    """
    last = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                request = _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            is_sound = request.input_length > 0 and request.output_length > 0
            if not is_sound or request.timestamp < last:
                raise ValueError(f"{path}:{number}: length 0, or earlier than the previous request")
            last = request.timestamp
            yield request


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    with path.open("wb") as lines:
        for request in requests:
            lines.write(msgspec.json.encode(request) + b"\n")
