"""A cluster whose processes each run the code of a release, as their own interpreter."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.running import MODEL_BLOCK_BYTES, NUM_BLOCKS, WORKERS
from tests.skew.releases import WORKING_TREE, Release
from tests.support.cluster.chaos_cluster import CLIENT, MONITORED, SERVICES, ChaosCluster
from tests.support.cluster.service_processes import process_environ
from tests.support.servers import PASSWORD, Server, find_binary, free_port

FLEET = tuple(SERVICES)
LAME_DUCK_S = 1.0
DRAIN_S = 300.0  # of gateways, as in Kubernetes: more than the longest answer takes
MODEL_WORKERS = {**WORKERS, "kv-cache-bytes": str(NUM_BLOCKS * MODEL_BLOCK_BYTES)}
_VARIABLE = re.compile(r"\$(HEARTH_\w+)")


class RollingFleet(ChaosCluster):
    """A cluster of the demo model, or of the timing engine with steps of `step_s` seconds.
    `release_of` says by name whose code a process runs when it is started next.
    """

    def __init__(
        self,
        folder: Path,
        release: Release,
        services: tuple[str, ...] = FLEET,
        *,
        step_s: float | None = None,
        response_ttl_s: float = 86400.0,
    ) -> None:
        super().__init__(
            folder,
            step_s=step_s,
            worker_options=WORKERS if step_s is not None else MODEL_WORKERS,
            services=services,
            options_of={
                name: {
                    "lame-duck-s": str(LAME_DUCK_S),
                    "drain-timeout-s": str(DRAIN_S),
                    "response-ttl-s": str(response_ttl_s),
                }
                for name in services
                if name.startswith("gateway")
            },
        )
        self.release_of = dict.fromkeys(services, release)
        self._configured = release  # whose configuration nats-server has

    async def replace(self, name: str, release: Release) -> int:
        """Stops a process in order and starts it again with the code of `release`; returns its exit
        status once every gateway has it.
        """
        self.terminate(name)
        status = await self.ended(name, DRAIN_S + LAME_DUCK_S + 30.0)
        self.release_of[name] = release
        await self.restart(name)
        await self.wait_until_ready()
        return status

    async def configure(self, release: Release) -> None:
        """Has nats-server read the configuration that `release` prints. The command takes seconds
        on a busy machine, in which this process has to answer the server's pings.
        """
        self._configured = release
        await asyncio.to_thread(self._write_nats_config, self.nats_port)
        os.kill(self.pid("nats-server"), signal.SIGHUP)

    def _nats(self) -> Server:
        port = free_port()
        text = self._write_nats_config(port)
        environ = {**os.environ, **dict.fromkeys(_VARIABLE.findall(text), PASSWORD)}
        return Server([find_binary("nats-server"), "-c", str(self._nats_path)], port, environ)

    @property
    def _nats_path(self) -> Path:
        return self.folder / "nats.conf"

    def _write_nats_config(self, port: int) -> str:
        users = [f"{role}={name}" for name, role in self.services.items()]
        arguments = (*users, f"client={CLIENT}", "--host", "127.0.0.1", "--port", str(port))
        text = _run(self._configured, {}, "nats-config", *arguments)
        self._nats_path.write_text(text)
        return text

    def run_command(self, release: Release, *words: str) -> str:
        """Runs a command of the operator with the code of `release`, and returns its output."""
        return _run(release, {"HEARTH_REDIS_URL": self.redis_url}, *words)

    def _launch(self, name: str) -> None:
        release = self.release_of[name]
        is_timed = self._step_s is not None
        if is_timed and release.name == WORKING_TREE:
            super()._launch(name)  # forked
            return
        folder, *arguments = self._arguments(name)
        command = [*MONITORED, folder] if is_timed else ["-m", "services"]
        with (self.folder / f"{name}.log").open("ab") as log:
            log.write(f'{{"event": "release", "release": "{release.name}"}}\n'.encode())
            log.flush()
            self._processes[name] = subprocess.Popen(
                [sys.executable, *command, *arguments],
                cwd=release.root,
                env=environ_of(release, self._environ(name)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def environ_of(release: Release, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process of `release`, with these variables."""
    return {**process_environ(environ), "PYTHONPATH": str(release.root)}


def _run(release: Release, environ: Mapping[str, str], *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "services", *words],
        cwd=release.root,
        env=environ_of(release, environ),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
