"""Decodes a request's body: decompresses gzip and deflate as they arrive, and reads UTF-8.

bytes ──decompress, in parts──▶ bytes, each counted before the next part ──▶ UTF-8 or 415
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from services.gateway.http.errors import UnsupportedMediaType

PART_BYTES = 64 * 1024  # bytes of a decompressed body between two counts
MAX_MEMBERS = 16  # gzip members in a row: each copies the input that is left
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's window bits, with the container
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)
_UTF8 = {"", "utf-8", "utf8", "us-ascii", "ascii"}
_MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors write
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00")


class BodyEncoding:
    """The encoding of one request's body, from its headers. Raises UnsupportedMediaType for unknown
    encodings.
    """

    def __init__(self, content_encoding: str | None, content_type: str | None) -> None:
        encoding = (content_encoding or "identity").strip().lower()
        if encoding not in ("", "identity", *_WINDOWS):
            raise UnsupportedMediaType(
                f"content-encoding: {encoding[:64]!r} is not supported: send gzip, deflate or none"
            )
        found = _CHARSET.search(content_type or "")
        charset = found[1].lower() if found else ""
        if charset not in _UTF8:
            raise _other_text(charset[:64])
        window = _WINDOWS.get(encoding)
        self._window = window
        self._inflating = None if window is None else zlib.decompressobj(window)
        self._num_members = 1

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the body's next bytes in parts of at most PART_BYTES, or an uncompressed chunk as
        one part. No part is empty. Raises UnsupportedMediaType.
        """
        if self._inflating is None:
            yield chunk
            return
        part = b""
        while chunk or len(part) == PART_BYTES:  # zlib may hold more without input
            part = self._inflated(chunk)
            if part:
                yield part
            chunk = self._inflating.unconsumed_tail or self._inflating.unused_data

    def _inflated(self, chunk: bytes) -> bytes:
        assert self._inflating is not None and self._window is not None, "it is compressed"
        if self._inflating.eof and chunk:  # another gzip member follows
            self._inflating = zlib.decompressobj(self._window)
            self._num_members += 1
            if self._num_members > MAX_MEMBERS:
                reason = f"content-encoding: the body has more than {MAX_MEMBERS} gzip members"
                raise UnsupportedMediaType(reason)
        try:
            return self._inflating.decompress(chunk, PART_BYTES)
        except zlib.error as error:
            reason = f"content-encoding: the body is in another form: {error}"
            raise UnsupportedMediaType(reason) from None

    def text(self, body: bytes) -> bytes:
        """Returns the complete body as UTF-8, without a byte order mark. Raises
        UnsupportedMediaType.
        """
        if self._inflating is not None and body and not self._inflating.eof:
            raise UnsupportedMediaType("content-encoding: the compressed body is cut off")
        if body.startswith(_OTHER_MARKS) or body[1:2] == b"\x00":
            raise _other_text("utf-16 or utf-32")
        return body.removeprefix(_MARK)


def _other_text(charset: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"the body is {charset}: only UTF-8 is read")
