"""Failing devices, doubled identities, greedy tenants, distance and attackers: one bar for each.

Run: python -m benchmarks.adversity [--rows F1 S1 …]

Real nats-server, Redis and processes on one machine. "Alone" is the same load without the attacker
in the same run, so that a bar is a ratio or a count.

| rows | module | what is done to the cluster |
| --- | --- | --- |
| C1–C6 | `bounds.py` | one tenant, or a caller without a key, takes what the gateway has for all |
| F1–F5 | `tenants.py` | one tenant sends what is expensive, another is the victim |
| M1 | `slow_clients.py` | clients that do not read their responses |
| S1, S2, U1 | `devices.py` | a device fails every step; one request breaks all; unequal caches |
| I1, I2 | `identity.py` | two processes of one name; rolling replacements under load |
| D1 | `distance.py` | regions up to 300 ms apart |
| P2, P3 | `wire.py` | relays that record, and forged commands |
| R1 | `redis_loss.py` | Redis is killed and returns empty |
| L1 | `surroundings/logs.py` | logs on a full disk, or on pipes without a reader; workers die |
| H1 | `surroundings/hub.py` | a hub that fails in every way, beside a host and a gateway |
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks.report import Bar, Row, write_result

MODULES = {
    "devices": ("S1", "S2", "U1"),
    "identity": ("I1", "I2"),
    "distance": ("D1",),
    "wire": ("P2", "P3"),
    "redis_loss": ("R1",),
    "slow_clients": ("M1",),
    "bounds": ("C1", "C2", "C3", "C4", "C5", "C6"),
    "tenants": ("F1", "F2", "F3", "F4", "F5"),
    "surroundings.logs": ("L1",),
    "surroundings.hub": ("H1",),
}
ALL_ROWS = [row for rows in MODULES.values() for row in rows]


async def measure(wanted: Sequence[str]) -> tuple[list[Row], list[Bar]]:
    """Each module has `async def measure(rows) -> list[Bar]`; a bar's name begins with its row."""
    console, rows, bars = Console(), [], []
    for module, provided in MODULES.items():
        chosen = [each for each in provided if each in wanted]
        if not chosen:
            continue
        began = time.monotonic()
        found = await importlib.import_module(f"benchmarks.adversity.{module}").measure(chosen)
        seconds = time.monotonic() - began
        console.print(f"{module}: {', '.join(chosen)}: {seconds:.0f} s")
        rows.append({"module": module, "rows": " ".join(chosen), "seconds": round(seconds, 1)})
        bars += found
    return rows, bars


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ALL_ROWS, default=ALL_ROWS, metavar="ROW")
    given = parser.parse_args(argv)
    rows, bars = asyncio.run(measure(given.rows))
    command = ["-m", "benchmarks.adversity", *argv]
    write_result("adversity", rows, bars, command, is_full=set(given.rows) == set(ALL_ROWS))


if __name__ == "__main__":
    main(sys.argv[1:])
