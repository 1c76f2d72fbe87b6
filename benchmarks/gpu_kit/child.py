"""One part of the kit, in this process: a module's `run(session)`.

Its first row is written before anything heavy is imported. The final status goes to a file: if that
file is missing, the process died.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from benchmarks.gpu_kit.session import Mode, NotBuilt, Session, Unavailable

if TYPE_CHECKING:
    from tests.support.kernels.fake_driver import FakeDriver

Ending = tuple[str, str]  # status, reason


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module")
    parser.add_argument("arguments", nargs="*", help="of its run(), after the session")
    parser.add_argument("--part", required=True, help="name of the part in the results")
    parser.add_argument("--needs", nargs="*", default=[], help="modules that must be installed")
    parser.add_argument("--rows", type=Path, required=True, help="file that rows are appended to")
    parser.add_argument("--ending", type=Path, required=True, help="file for the final status")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time until it is killed")
    parser.add_argument("--mode", choices=get_args(Mode), default="device")
    given = parser.parse_args(argv)
    ends = time.monotonic() + given.seconds
    session = Session(given.part, given.rows, mode=given.mode, ends=ends)
    session.add(case="begun", has_torch="torch" in sys.modules)
    status, reason = run(session, given.module, given.arguments, given.needs)
    given.ending.write_text(json.dumps({"status": status, "reason": reason}))


def run(session: Session, module: str, arguments: Sequence[str], needs: Sequence[str]) -> Ending:
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        return "unavailable", f"not installed: {', '.join(missing)}"
    try:
        with _launches_go_to(session, needs):
            import_module(module).run(session, *arguments)
    except NotBuilt as error:
        return "not built", str(error)
    except Unavailable as error:
        return "unavailable", str(error)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}".partition("\n")[0][:500]
    if session.failures:
        return "failed", f"wrong results: {', '.join(session.failures)}"[:500]
    return "ok", ""


@contextmanager
def _launches_go_to(session: Session, needs: Sequence[str]) -> Iterator[None]:
    """Launches of a fake driver are counted, and elsewhere the kernels that Triton's cache had. A
    part that needs nothing launches nothing.
    """
    with ExitStack() as stack:
        if "triton" in needs and session.mode != "dry":
            stack.enter_context(_kernels_counted(session))
        if session.is_dry and needs:
            driver = stack.enter_context(_launches_counted(session))
            if session.mode == "compile":
                from benchmarks.gpu_kit.compiled.compile_ahead import compiling_ahead

                stack.enter_context(compiling_ahead(driver))
        yield


@contextmanager
def _kernels_counted(session: Session) -> Iterator[None]:
    from benchmarks.gpu_kit.compiled.carried_cache import counting

    with counting() as counts:
        try:
            yield
        finally:
            if counts.hits or counts.misses:
                session.add(
                    case="compiled",
                    hits=counts.hits,
                    misses=counts.misses,
                    missed=sorted(counts.compiled) if session.mode == "device" else None,
                )


@contextmanager
def _launches_counted(session: Session) -> Iterator[FakeDriver]:
    from benchmarks.gpu_kit.dry.dry_device import dry_device

    with dry_device("ttir" if session.mode == "dry" else "cubin") as driver:
        try:
            yield driver
        finally:
            kernels: Counter[str] = Counter()
            for (name, _), count in driver.launches.items():
                kernels[name] += count
            by_kernel = dict(sorted(kernels.items()))
            session.add(case="launches", total=kernels.total(), by_kernel=by_kernel)


if __name__ == "__main__":
    main(sys.argv[1:])
