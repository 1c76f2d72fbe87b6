"""Downloads one hub model in a process of its own: python -m … ORG/NAME [reply on stdout].

A hub may send anything, and native code takes part in a download: at worst this process ends.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

from services.local.hub_download import local_copy
from services.local.processes.child_processes import ending
from services.local.processes.module_process import run_module
from shared.errors import ConfigError
from shared.lifecycle.child_process import NETWORK_NAMES, child_environ

MODULE = "services.local.hub_process"
NICENESS = 10  # serving processes of this machine have priority
MAX_MEMORY_BYTES = 4 << 30  # data of the process: files are not kept in memory


class HubReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a download. `failure` says why there is no directory."""

    directory: str = ""
    failure: str = ""


async def downloaded(model: Path) -> Path:
    """Returns the directory of a hub model. A cancellation ends the download. Call on the main
    thread. Raises ConfigError, whatever the hub does.
    """
    environ = child_environ(os.environ, names=NETWORK_NAMES, prefixes=("HF_", "HUGGING"))
    try:
        status, output = await run_module(
            MODULE, str(model), environ={**environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        )
    except OSError as error:
        raise ConfigError(f"cannot start a download: {error.strerror}") from None
    if status or not output:
        raise ConfigError(f"model {str(model)!r}: its download ended with {ending(status)}")
    reply = msgspec.json.decode(output, type=HubReply)
    if reply.failure:
        raise ConfigError(reply.failure)
    return Path(reply.directory)


def main(model: str) -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout, which is for replies
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.nice(NICENESS)
    try:
        reply = HubReply(directory=str(local_copy(Path(model))))
    except ConfigError as error:
        reply = HubReply(failure=error.message)
    os.write(output, msgspec.json.encode(reply))
    os._exit(0)  # threads of a client must not delay the end


if __name__ == "__main__":
    main(sys.argv[1])
