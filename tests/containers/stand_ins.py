"""Images that docker-compose.yml names, made of this machine's packages where no registry answers.

`python` is a minimal Debian; the others are binaries of this machine, with busybox. What stands in
for the collector of traces prints which it gets.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.containers.engine import Engine
from tests.support.servers import find_binary

PYTHON, NATS, REDIS = "python:3.12-slim", "nats:2.11-alpine", "redis:7-alpine"
PROMETHEUS, COLLECTOR = "prom/prometheus:v2.53.0", "otel/opentelemetry-collector:0.104.0"
REDIS_ID, NOBODY_ID = 999, 65534
TRACE_PRINTER = """\
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print("received", len(body), "bytes at", self.path)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
ThreadingHTTPServer(("", 4318), Handler).serve_forever()
"""
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"


def make_stand_ins(engine: Engine) -> list[str]:
    """Returns the names of the images that were made."""
    made = []
    for name, make in MAKERS.items():
        if engine.has_image(name) or _is_pulled(engine, name):
            continue
        with TemporaryDirectory() as folder:
            changes = make(Path(folder))
            _import(engine, Path(folder), name, changes)
        made.append(name)
    if not engine.has_image(COLLECTOR) and not _is_pulled(engine, COLLECTOR):
        with TemporaryDirectory() as folder:
            _build_collector(engine, Path(folder))
        made.append(COLLECTOR)
    return made


def _is_pulled(engine: Engine, name: str) -> bool:
    if engine.is_podman:  # its configuration here has no registry
        return False
    engine.run("pull", name, is_checked=False)
    return engine.has_image(name)


def _import(engine: Engine, folder: Path, name: str, changes: Iterable[str]) -> None:
    options = [f"--change={each}" for each in changes]
    packed = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
    command = [*engine.command, "import", *options, "-", name]
    subprocess.run(
        command, stdin=packed.stdout, env=engine.environ, check=True, capture_output=True
    )
    assert packed.wait() == 0, "tar"


def _python(folder: Path) -> list[str]:
    (codename,) = re.findall(r"^VERSION_CODENAME=(\S+)", Path("/etc/os-release").read_text(), re.M)
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", codename, str(folder)]
    subprocess.run([*command, *_mirror()], check=True, capture_output=True)
    (folder / "usr/bin/python").symlink_to("python3")
    for each in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        each.unlink()
    return ["CMD python3"]


def _mirror() -> list[str]:
    """Returns the package index that apt uses here, if it says so."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [each for each in found if each.startswith("http")][:1]


def _nats(folder: Path) -> list[str]:
    _add_busybox(folder)
    _add_program(folder, find_binary("nats-server"))
    return ['ENTRYPOINT ["nats-server"]']


def _redis(folder: Path) -> list[str]:
    _add_busybox(folder)
    for each in ("redis-server", "redis-cli"):
        _add_program(folder, find_binary(each))
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text(f"redis:x:{REDIS_ID}:{REDIS_ID}::/data:/bin/sh\n")
    (folder / "etc/group").write_text(f"redis:x:{REDIS_ID}:\n")
    (folder / "data").mkdir()
    shutil.chown(folder / "data", REDIS_ID, REDIS_ID)
    return ["VOLUME /data", "WORKDIR /data", 'CMD ["redis-server"]']


def _prometheus(folder: Path) -> list[str]:
    _add_program(folder, find_binary("prometheus"))
    for each in ("prometheus", "tmp"):
        (folder / each).mkdir()
        shutil.chown(folder / each, NOBODY_ID, NOBODY_ID)
    options = ("--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus")
    entry = json.dumps(["prometheus", *options])
    return [f"ENTRYPOINT {entry}", f"USER {NOBODY_ID}", "VOLUME /prometheus"]


def _build_collector(engine: Engine, folder: Path) -> None:
    entry = json.dumps(["python3", "-u", "-c", TRACE_PRINTER])
    (folder / "Dockerfile").write_text(f"FROM {PYTHON}\nENTRYPOINT {entry}\nUSER {NOBODY_ID}\n")
    engine.run("build", "--tag", COLLECTOR, folder)


def _add_busybox(folder: Path) -> None:
    """Adds a shell and the tools of health checks."""
    busybox = shutil.which("busybox")
    if busybox is None:
        sys.exit("try_compose: busybox is missing: apt-get install busybox-static")
    _add_program(folder, busybox, "bin")
    for tool in ("sh", "nc", "grep", "sleep", "cat"):
        (folder / "bin" / tool).symlink_to("busybox")


def _add_program(folder: Path, program: str, where: str = "usr/local/bin") -> None:
    """Adds a program with the libraries that it loads."""
    path = Path(program).resolve()
    (folder / where).mkdir(parents=True, exist_ok=True)
    shutil.copy(path, folder / where / Path(program).name)
    found = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", found):
        target = folder / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


MAKERS = {
    PYTHON: _python,
    NATS: _nats,
    REDIS: _redis,
    PROMETHEUS: _prometheus,
}
