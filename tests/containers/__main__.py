"""docker-compose.yml, really run: `scripts/try_compose`. Prints a transcript; it fails at the first
step that does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.containers import checks
from tests.containers.engine import ROOT, Engine, find_engine, without_systemd
from tests.containers.pip_settings import build_options
from tests.containers.questions import QUESTIONS, Api
from tests.containers.stand_ins import make_stand_ins
from tests.support.servers import free_port
from tests.support.waiting import wait_until

IMAGE = "hearth:cpu"
FIRST_ANSWER_S = 60.0
LIMIT_S = 180.0
STATE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hearth-try-compose"
DOWN = ("down", "--volumes", "--remove-orphans", "--timeout", "10")
KEY = re.compile(r"^\S{20,}$", re.MULTILINE)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Prints how long a step took, whether it holds or not."""
    began_at = time.monotonic()
    try:
        yield
    finally:
        print(f"{time.monotonic() - began_at:7.1f} s  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/try_compose", description=__doc__)
    parser.add_argument("--rebuild", action="store_true", help="build hearth:cpu also if it exists")
    parser.add_argument("--clean", action="store_true", help="delete podman's images at the end")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        run(Path(folder), is_rebuilt=options.rebuild)
    if options.clean:
        shutil.rmtree(STATE, ignore_errors=True)
    return 0


def run(folder: Path, *, is_rebuilt: bool) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "HEARTH_SECRETS": str(folder / "secrets"),
        "HEARTH_HTTP": address,
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    }
    engine = find_engine(STATE, settings)
    with without_systemd(engine):
        with step("images"):
            build(engine, folder, is_rebuilt=is_rebuilt)
        user = "0" if engine.is_podman else str(os.getuid())
        with step("secrets"):
            engine.run(
                "run",
                "--rm",
                "--user",
                user,
                "--volume",
                f"{folder}:/here",
                IMAGE,
                "credential",
                "--folder",
                "/here/secrets",
            )
        with step("a snapshot of the hub's cache, whose files are links"):
            checks.check_snapshot(engine, IMAGE, folder)
        try:
            try_cluster(engine, f"http://{address}", folder / "secrets")
        except BaseException:
            print(engine.compose("logs", "--tail", "20", is_checked=False), file=sys.stderr)
            raise
        finally:
            with step("down, with its volumes"):
                engine.compose(*DOWN, is_checked=False)
        assert engine.containers() == []


def build(engine: Engine, folder: Path, *, is_rebuilt: bool) -> None:
    made = make_stand_ins(engine)
    print(f"           stand-ins made now: {', '.join(made) or 'none'}")
    if engine.has_image(IMAGE) and not is_rebuilt:
        return
    if not engine.is_podman:
        engine.compose("build", "gateway")
        return
    arguments = " ".join(build_options(folder))
    engine.compose(
        "--podman-build-args", arguments, "build", "--build-arg", "PIP_EXTRA_INDEX_URL=", "gateway"
    )


def try_cluster(engine: Engine, url: str, secrets: Path) -> None:
    began_at = time.monotonic()
    with step("up"):
        engine.compose("up", "--detach", "--no-build")
    with step("a tenant, by the operator"):
        key = wait_for(lambda: new_key(engine))
    api = Api(url, key)
    with step("the first answer"):
        wait_for(lambda: answer(api))
    taken_s = time.monotonic() - began_at
    print(f"           up to the first answer: {taken_s:.1f} s (at most {FIRST_ANSWER_S:g} s)")
    assert taken_s <= FIRST_ANSWER_S
    with step("a question over every API"):
        for each in QUESTIONS:
            print(f"           {each.path}: {str(api.ask(each))[:60]!r}")
    with step("containers: users, capabilities, file systems, variables"):
        checks.check_containers(engine)
    with step("tokens of operator and metrics, page, observer"):
        checks.check_access(engine, api, secrets)
    with step("traces and metrics, by the profile observe"):
        checks.check_observed(engine, api)
    with step("decode scaled to 2"):
        engine.compose("up", "--detach", "--no-build", "--scale", "decode=2")
        wait_for(lambda: len(checks.ready_workers(api, secrets, "decode")) == 2)
    with step("a decode container killed in a stream, and started again"):
        checks.check_killed_worker(engine, api, secrets)
    for service in ("kv_index", "scheduler", "gateway", "prefill"):
        with step(f"{service} upgraded"):
            checks.check_upgrade(engine, api, service)


def new_key(engine: Engine) -> str | None:
    output = engine.run_tool("operator", "tenant", "add", "default", is_checked=False)
    found = KEY.search(output)
    return found[0] if found else None


def answer(api: Api) -> object:
    try:
        return api.ask(QUESTIONS[0])
    except httpx.HTTPError:
        return None


def wait_for(condition: Callable[[], Any]) -> Any:
    return wait_until(condition, timeout_s=LIMIT_S, poll_s=0.2)


if __name__ == "__main__":
    assert Path.cwd() == ROOT, "run it by scripts/try_compose"
    sys.exit(main())
