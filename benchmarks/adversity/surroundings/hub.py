"""H1: a hub that cuts, resets, drips, and answers HTML, errors and wrong sizes.

A host and a gateway of one machine; every kind of fault is a model of the host's catalogue. Their
probes are asked all the time until each model has failed, or drips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Bar, at_most
from tests.support.services.faulty_hub import ENDLESS, FAULTS, faulty_hub, hub_environ
from tests.support.services.live_host import link_model, live_host, operator
from tests.support.services.probes import Probes

BAR_MS = 100


async def measure(rows: Sequence[str]) -> list[Bar]:
    assert "H1" in rows
    with TemporaryDirectory(prefix="hearth-hub-") as name, faulty_hub() as url:
        folder = Path(name)
        link_model(folder / "demo-a")
        with live_host(folder, environ=hub_environ(url, name)) as host:
            gateway = await asyncio.to_thread(host.start_gateway)
            async with operator(host) as op:
                await op.registry.add("demo-a", str(folder / "demo-a"))
                await op.state("demo-a", "standby", "hot")
                async with Probes({"host": host.health_url, "gateway": gateway}) as probes:
                    for fault in FAULTS:
                        await op.registry.add(fault, f"org/{fault}")
                    for fault in FAULTS:
                        if fault not in ENDLESS:
                            await op.state(fault, "failed")
    return [
        bar
        for process in ("host", "gateway")
        for bar in (
            at_most(f"H1: {process}, probe p50", probes.p50_ms(process), BAR_MS, "ms"),
            at_most(f"H1: {process}, probe p99", probes.p99_ms(process), BAR_MS, "ms"),
            at_most(f"H1: {process}, slowest probe", probes.max_ms(process), BAR_MS, "ms"),
            at_most(f"H1: {process}, probes that failed", probes.num_failed[process], 0, "probes"),
        )
    ]
