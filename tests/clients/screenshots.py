"""Takes the README's pictures of the gateway's page: `scripts/screenshots`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.__main__ import FOLDER, ROOT, browser_account, python_of
from tests.support.account import EYES, VARIABLE, Account, write_accounts
from tests.support.cluster.hearth_up import run_cluster

SEEING = "hearth-demo-vision"
REQUIREMENTS = FOLDER / "browser" / "browser.txt"


def main() -> int:
    """Returns the exit status of the browser's part."""
    with tempfile.TemporaryDirectory(prefix="hearth-screenshots-") as folder:
        accounts = Path(folder) / "accounts.json"
        with (
            run_cluster(Path(folder, "text"), "--decode", "3") as cluster,
            run_cluster(Path(folder, "eyes"), "--model", SEEING) as eyes,
        ):
            write_accounts(
                accounts, [browser_account(cluster, 3), Account(eyes.url, EYES, eyes.state.api_key)]
            )
            command = [python_of(REQUIREMENTS), "-m", "tests.clients.browser.screenshots"]
            environ = os.environ | {VARIABLE: str(accounts)}
            return subprocess.run(command, cwd=ROOT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
