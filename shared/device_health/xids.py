"""Which Xid errors of NVIDIA's driver end a worker.

NVIDIA's catalogue names an action for each: https://docs.nvidia.com/deploy/xid-errors/. Those that
ask for a reset of the GPU or a restart of the machine end it, and so do uncorrected ECC errors,
also one that the GPU contained to a process: its memory is not what was written. A worker that
starts again finds out whether the device still computes.

Others do not: faults of an application (13, 31, 32, 43, 45, 68, 69), which raise in the process
that caused them; a remapped row, corrected errors (63, 92), which need a reset at some time; NVLink
(74), which a model on one GPU does not use.
"""

from __future__ import annotations

FATAL_XIDS = {
    46: "the GPU stopped processing",
    48: "double bit ECC error",
    62: "the power management unit halted",
    64: "a row could not be remapped",
    79: "the GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    151: "key rotation error",
    156: "resource retirement",
    158: "fatal timeout of the GPU",
}


def fatal_xid(xid: int) -> str | None:
    """Returns why this Xid ends the worker, or None if it does not."""
    meaning = FATAL_XIDS.get(xid)
    return None if meaning is None else f"Xid {xid}: {meaning}"
