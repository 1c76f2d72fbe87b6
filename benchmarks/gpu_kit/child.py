"""One part of the kit, in this process: a module's `run(session)`.

Writes its final status to a file. If that file is missing, the process died.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_kit.session import NotBuilt, Session, Unavailable


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module")
    parser.add_argument("arguments", nargs="*", help="of its run(), after the session")
    parser.add_argument("--part", required=True, help="name of the part in the results")
    parser.add_argument("--needs", nargs="*", default=[], help="modules that must be installed")
    parser.add_argument("--rows", type=Path, required=True, help="file that rows are appended to")
    parser.add_argument("--ending", type=Path, required=True, help="file for the final status")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time until it is killed")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(argv)
    ends = time.monotonic() + given.seconds
    session = Session(given.part, given.rows, is_dry=given.dry_run, ends=ends)
    status, reason = run(session, given.module, given.arguments, given.needs)
    given.ending.write_text(json.dumps({"status": status, "reason": reason}))


def run(
    session: Session, module: str, arguments: Sequence[str], needs: Sequence[str]
) -> tuple[str, str]:
    """Returns status and reason."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        return "unavailable", f"not installed: {', '.join(missing)}"
    try:
        import_module(module).run(session, *arguments)
    except NotBuilt as error:
        return "not built", str(error)
    except Unavailable as error:
        return "unavailable", str(error)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}".partition("\n")[0][:500]
    return "ok", ""


if __name__ == "__main__":
    main(sys.argv[1:])
