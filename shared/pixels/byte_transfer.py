"""The receiving end of one transfer of bytes: pixels of an image, or its vectors."""

from __future__ import annotations

import asyncio

from shared.errors import FrameRefused, HearthError, LinkLost
from shared.kv_wire.link import FrameHeader
from shared.pixels.pixel_frames import PIXEL_FORMAT, check_byte_header

STALL_S = 5.0  # without a frame


class ByteTransfer:
    """The `FrameSink` of one try. Its frames come in order."""

    def __init__(self, num_bytes: int, byte_format: str = PIXEL_FORMAT) -> None:
        self._format = byte_format
        self._content = bytearray(num_bytes)
        self._bytes = memoryview(self._content)
        self._num_received = 0
        self._changed = asyncio.Event()
        self._error: HearthError | None = None

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        check_byte_header(header, self._num_received, len(self._bytes), self._format)
        end = self._num_received + len(payload)
        self._bytes[self._num_received : end] = payload
        self._num_received = end
        self._changed.set()

    def corrupt(self, header: FrameHeader) -> None:
        self.fail(LinkLost(f"frame {header.sequence_number} of an image failed its checksum"))

    def outside(self) -> None:
        self.fail(FrameRefused("an image comes from outside of the tenant's regions"))

    def link_lost(self) -> None:
        self.fail(LinkLost("the link to the sender of an image was lost"))

    async def complete(self, stall_s: float | None = None) -> memoryview:
        """Returns the bytes. Raises LinkLost if no frame comes for `stall_s`, and the error that
        has ended the transfer.
        """
        while self._num_received < len(self._bytes) and self._error is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(stall_s):
                    await self._changed.wait()
            except TimeoutError:
                self.fail(LinkLost(f"nothing of an image came for {stall_s:g} s"))
        if self._error is not None:
            raise self._error
        return self._bytes

    def fail(self, error: HearthError) -> None:
        """Ends the transfer with an error, unless it is complete."""
        if self._num_received < len(self._bytes):
            self._error = error
        self._changed.set()

    def taken(self) -> bytearray:
        """Returns the memory of the bytes."""
        return self._content

    def zero(self) -> None:
        self._bytes[:] = bytes(len(self._bytes))
