"""Kit parts with the behaviours and faults that real parts may have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_kit.session import NotBuilt, Session, Unavailable


def run(session: Session, behaviour: str, folder: str = "") -> None:
    session.add(case="ran")
    match behaviour:
        case "raise":
            raise ValueError("three is not four")
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            hang(Path(folder))
        case "not built":
            raise NotBuilt("no such feature")
        case "lacks":
            raise Unavailable("no such tool")
        case "talk":
            print("x" * (1 << 20))
        case "flood":
            session.add(case="x" * (2 << 20))
        case "start":
            subprocess.run(["carried-program"], check=True)
        case "launch and raise":
            launch(session)
            raise ValueError("three is not four")


def hang(folder: Path) -> None:
    """Hangs with a child process; both ignore SIGTERM. Writes both process ids."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", code])
    (folder / "ids").write_text(f"{os.getpid()} {child.pid}")
    signal.pause()


def launch(session: Session) -> None:
    """Launches one kernel twice, at the sizes of the session's model."""
    from kernels.gpu.rows.rms_norm import rms_norm

    for num_rows in (1, 2):
        x = session.random(num_rows, session.shapes.hidden)
        rms_norm(x, x[0], 1e-5)
