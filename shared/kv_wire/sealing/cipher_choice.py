"""The ciphers of sealed links, and what links know of them before they have one.

Links over unix sockets are never sealed: nothing here imports cryptography.
"""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

TAG_BYTES = 16
NONCE_BYTES = 32  # length in Hello and Welcome
AES, CHACHA = "aes-256-gcm", "chacha20-poly1305"


@cache
def has_aes_instructions() -> bool:
    """Whether this CPU has them: without, ChaCha20 is faster and takes constant time."""
    try:
        cpu_info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() == "arm64"  # macOS: all of these have them
    return re.search(r"^(flags|Features)\s*:.*\baes\b", cpu_info, re.MULTILINE) is not None


def preferred_ciphers() -> tuple[str, ...]:
    """Returns the ciphers that this host can use, fastest first."""
    return (AES, CHACHA) if has_aes_instructions() else (CHACHA, AES)


def common_cipher(offered: tuple[str, ...], own: tuple[str, ...]) -> str | None:
    """Returns AES if it is the first choice of both ends, else ChaCha20; None if the
    peer has neither.
    """
    if offered[:1] == own[:1] == (AES,):
        return AES
    return CHACHA if CHACHA in offered else None
