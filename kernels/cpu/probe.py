"""Whether compiled loops work on this host: tested once, in a child process.

LLVM aborts a process that compiles an instruction that its target lacks, and the CPU stops a
process that runs an instruction that the host lacks. `NUMBA_CPU_NAME` can cause both. The result
is cached with the machine code, so later starts do not test again.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numba
import torch

from kernels.cpu.compile import SOURCES_DIGEST, cache_dir, locked, start_child
from kernels.cpu.simd import cpu_features

TIMEOUT_S = 300.0
WORKS = "works"
FRAMES_CHILD = "kernels.cpu.codec.try_frame"
# Signals from outside: they prove nothing about compiled loops.
_PASSING = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


@cache
def failure() -> str | None:
    """Returns the reason that compiled loops cannot be used; None if they can."""
    return _failure(lambda: _tried(_result_path(), "kernels.cpu.probe"))


@cache
def frames_failure() -> str | None:
    """Returns the reason that the loops of KV frames cannot be used; None if they can.

    If nothing is known, a child compiles them alone, in a third of the time of `failure`, and
    without torch. This process finds their code in the cache.
    """
    return _failure(lambda: _known(_result_path()) or _tried(_frames_path(), FRAMES_CHILD))


def _failure(find: Callable[[], str]) -> str | None:
    if lacks_fma():
        return f"numba's target {cpu_features.target_cpu()!r} has no fused multiply-add"
    try:
        found = find()
    except OSError as error:
        return f"no cache for machine code: {error}"
    return None if found == WORKS else found


def _tried(path: Path, child: str) -> str:
    """Returns the result at `path`, or that of a child, which one process of a host runs."""
    found = _known(path)
    if found is None:
        with locked(path.with_suffix(".lock")):
            found = _known(path) or _try(path, child)
    return found


def lacks_fma() -> bool:
    """Whether the target lacks fused multiply-add; such a target is not probed."""
    return not cpu_features.has_fma()


def known_failure() -> str | None:
    """The result of `failure`, if it is cached."""
    found = _known(_result_path())
    return None if found == WORKS else found


def record(status: int, errors: str) -> None:
    """Stores the result of a child that compiled, for this process and later ones."""
    if not is_from_outside(status):
        _result_path().write_text(WORKS if status == 0 else _reason(status, errors))
    failure.cache_clear()


def is_from_outside(status: int) -> bool:
    """Whether a child with this exit status was stopped, by a user or for memory."""
    return status in _PASSING


def _result_path() -> Path:
    return Path(cache_dir(), f"probe-{target_key()}")


def _frames_path() -> Path:
    return Path(cache_dir(), f"probe-frames-{target_key()}")


def target_key() -> str:
    """Digests what determines the machine code, besides a function's types."""
    features = ",".join(sorted(cpu_features.target_features()))
    target = cpu_features.target_cpu(), features, numba.__version__, SOURCES_DIGEST
    return blake2b("\n".join(target).encode(), digest_size=8).hexdigest()


def _known(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text() or None
    return None


def _try(path: Path, module: str) -> str:
    child = start_child(module)
    try:
        _, errors = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"compiling took more than {TIMEOUT_S:g} s"
    found = WORKS if child.returncode == 0 else _reason(child.returncode, errors)
    if not is_from_outside(child.returncode):
        path.write_text(found)
    return found


def _reason(status: int, errors: str) -> str:
    ending = f"signal {-status}" if status < 0 else f"exit status {status}"
    lines = errors.strip().splitlines()
    said = next((each for each in lines if "LLVM" in each), lines[-1] if lines else "no message")
    return f"compiling for {cpu_features.target_cpu()!r} ended with {ending}: {said.strip()}"


def main() -> int:
    """Compiles this CPU's best form of GEMM and runs it. Returns 0 if the result is right."""
    from kernels.cpu.gemm.linear import pack_weight
    from kernels.cpu.gemm.packed_linear import for_gemm, packed_linear
    from kernels.cpu.layer.rms_norm import rms_norm

    is_bf16 = cpu_features.has_pair_products() or cpu_features.has_amx()
    x = (torch.arange(4 * 32) % 7 - 3).view(4, 32).to(torch.bfloat16 if is_bf16 else torch.float32)
    weight = (torch.arange(32 * 32) % 5 - 2).view(32, 32).to(x.dtype)
    packed = for_gemm(pack_weight(weight))
    if packed is not None:
        return int(not torch.equal(packed_linear(x, packed).float(), x.float() @ weight.float().T))
    ones = torch.ones_like(x)
    return int(not torch.allclose(rms_norm(ones, ones[0], 0.0), ones))


if __name__ == "__main__":
    sys.exit(main())
