"""Memory that the ranks of one host share, and counters in it on which they wait.

A word counts up and is written by one process alone. A reader checks it for some microseconds, then
sleeps in the kernel (futex) until it changes. Whoever sees a word sees the data written before it:
x86-64 retains the order of stores, so this runs on no other machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

LINE_BYTES = 64  # each word has a cache line of its own
_FUTEX_SYSCALL = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1
_MASK = 2**32 - 1
SPINS = 50  # 25 µs: a shorter wait costs no sleep
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def create_memory(name: str, num_bytes: int) -> int:
    """Returns a memfd of zeros, without any page allocated. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps the memory. Raises ValueError if the memory is smaller, since access would then
    end the process.
    """
    if os.fstat(fd).st_size < num_bytes:
        raise ValueError(f"shared memory of {os.fstat(fd).st_size} bytes: {num_bytes} are needed")
    return mmap.mmap(fd, num_bytes)


def check_machine() -> None:
    """Raises ValueError on machines whose processors reorder stores."""
    if platform.machine() != "x86_64":
        raise ValueError(f"ranks share memory on x86-64 only, not on {platform.machine()}")


def num_spins(num_ranks: int) -> int:
    """Returns how often a wait spins: never where ranks outnumber processors, as the rank waited
    for may need this one.
    """
    return SPINS if num_ranks <= len(os.sched_getaffinity(0)) else 0


class SharedWords:
    """Words of 32 bits at the start of shared memory, at `address`; they wrap around."""

    def __init__(self, memory: mmap.mmap, num_words: int, spins: int) -> None:
        check_machine()
        self._words = memoryview(memory)[: num_words * LINE_BYTES].cast("I")
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)
        self._spins = spins

    def publish(self, index: int, value: int) -> None:
        """Sets the word to a higher value and wakes all who wait for it."""
        self._words[index * (LINE_BYTES // 4)] = value & _MASK
        address = ctypes.c_void_p(self.address + index * LINE_BYTES)
        _LIBC.syscall(_FUTEX_SYSCALL, address, _FUTEX_WAKE, _ALL, None, None, 0)

    def wait(self, index: int, value: int, limit_s: float) -> bool:
        """Whether the word reaches the value within the limit."""
        words, at, value = self._words, index * (LINE_BYTES // 4), value & _MASK
        for _ in range(self._spins):
            if (words[at] - value) & _MASK <= _ALL:
                return True
            os.sched_yield()  # the rank waited for may be on this processor
        return self._sleep(index, at, value, time.monotonic() + limit_s)

    def _sleep(self, index: int, at: int, value: int, deadline: float) -> bool:
        address = ctypes.c_void_p(self.address + index * LINE_BYTES)
        while ((seen := self._words[at]) - value) & _MASK > _ALL:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            timeout = _Timespec(int(remaining_s), int(remaining_s % 1 * 1e9))
            # A wake, a signal and a word that has changed since return alike: it is read again.
            pointer = ctypes.byref(timeout)
            _LIBC.syscall(_FUTEX_SYSCALL, address, _FUTEX_WAIT, seen, pointer, None, 0)
        return True

    def close(self) -> None:
        self._words.release()
        del self._anchor
