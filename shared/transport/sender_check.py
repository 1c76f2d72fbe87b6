"""Whether a message comes from whom it names: the server vouches for the sender in its subject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.errors import SenderMismatch
from shared.messages import Message
from shared.subjects import owner_of

Decode = Callable[[bytes], Any]


class SenderCheck:
    """Of all that one bus hears; counts what came from another than it says."""

    def __init__(self) -> None:
        self.num_impostors = 0

    def checked(self, decode: Decode, sender_id: str) -> Decode:
        """As `decode`, for bytes that `sender_id` published. Its result raises SenderMismatch."""

        def decode_checked(data: bytes) -> Any:
            message = decode(data)
            self._check(message, sender_id)
            return message

        return decode_checked

    def check_reply(self, subject: str, reply: Message) -> None:
        """Raises SenderMismatch if another answers than was asked; in a group it may be anyone."""
        owner_id = owner_of(subject)
        if owner_id is not None:
            self._check(reply, owner_id)

    def _check(self, message: Message, sender_id: str) -> None:
        if message.sender_id not in (None, sender_id):
            self.num_impostors += 1
            name = type(message).__name__
            raise SenderMismatch(f"{sender_id} sent a {name} in the name of {message.sender_id}")
