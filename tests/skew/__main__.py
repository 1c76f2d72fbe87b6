"""Rolling upgrades between two releases: `scripts/skew OLD NEW`.

Both serve the demo model as real processes; a fleet of OLD is rolled to NEW process by process in
three orders, and back, while 32 clients send requests of all dialects. Prints one line a roll; the
exit status is 1 if an answer was lost or altered. Without OLD it is the release that
tests/skew/previous_release.txt names; NEW is the working tree.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.client.hearth_nats import HearthClient
from tests.skew.fleet import RollingFleet
from tests.skew.releases import (
    WORKING_TREE,
    CommitMissing,
    Release,
    previous_commit,
    release_of,
)
from tests.skew.roll import ORDERS, roll
from tests.skew.streams import Streams

NUM_ROLLS = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/skew", description="Rolling upgrades.")
    parser.add_argument("old", nargs="?", default=previous_commit())
    parser.add_argument("new", nargs="?", default=WORKING_TREE)
    parser.add_argument(
        "--rolls", type=int, default=NUM_ROLLS, help="of which every second is back"
    )
    parser.add_argument("--order", action="append", choices=ORDERS)
    about = "with steps of S seconds of the timing engine in place of the demo model"
    parser.add_argument("--step-s", type=float, metavar="S", help=about)
    parser.add_argument("--folder", type=Path, help="for logs; default: a new temporary one")
    options = parser.parse_args()
    try:
        old, new = release_of(options.old), release_of(options.new)
    except CommitMissing as error:
        print(f"skew: {error}", file=sys.stderr)
        return 2
    folder = options.folder or Path(tempfile.mkdtemp(prefix="skew-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{old.name} to {new.name}; logs in {folder}", flush=True)
    fleet = RollingFleet(folder, old, step_s=options.step_s)
    return asyncio.run(_roll(fleet, old, new, options.rolls, options.order or ORDERS))


async def _roll(
    fleet: RollingFleet, old: Release, new: Release, num_rolls: int, orders: Sequence[str]
) -> int:
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await fleet.start()
        nats = await HearthClient.connect(fleet.client_url)
        streams = Streams(fleet, nats)
        await streams.learn()
        for number in range(num_rolls):
            is_back = number % 2 == 1
            pair = (new, old) if is_back else (old, new)
            order = orders[number // 2 % len(orders)]
            row = await roll(fleet, streams, order, number, *pair, is_back=is_back)
            print(msgspec.json.encode(row).decode(), flush=True)
            for name, found in (("lost", streams.lost), ("altered", streams.altered)):
                for line in found[len(found) - getattr(row, name) :]:
                    print(f"{name}: {line[:600]}", flush=True)
        await nats.close()
    finally:
        fleet.stop()
    print(f"answers: {dict(streams.answered)}")
    print(f"refused: {dict(streams.refused)}")
    return int(bool(streams.lost or streams.altered))


if __name__ == "__main__":
    sys.exit(main())
