"""Checks that a message names its true sender, which the server enforces in the subject; for a
heartbeat also roles and region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.errors import SenderMismatch
from shared.messages import Heartbeat, Message
from shared.subjects import announced_by, owner_of, sender_of

Decode = Callable[[bytes], Any]


class SenderCheck:
    """Checks all messages that one bus receives, and counts those that name a wrong sender."""

    def __init__(self) -> None:
        self.num_sender_mismatches = 0

    def checked(self, decode: Decode, wire_subject: str) -> Decode:
        """Returns a decoder for bytes from `wire_subject`; it also raises SenderMismatch."""

        def decode_checked(data: bytes) -> Any:
            message = decode(data)
            self._check(message, sender_of(wire_subject))
            if isinstance(message, Heartbeat):
                self._check_announcement(message, wire_subject)
            return message

        return decode_checked

    def check_reply(self, subject: str, reply: Message) -> None:
        """Raises SenderMismatch if the reply is not from the addressed process. A reply from a
        group subject may come from any member.
        """
        owner_id = owner_of(subject)
        if owner_id is not None:
            self._check(reply, owner_id)

    def _check_announcement(self, message: Heartbeat, wire_subject: str) -> None:
        """Checks roles and region of a heartbeat, which are the credential's, not the
        process's choice.
        """
        roles, region = announced_by(wire_subject)
        may_have_roles = message.roles == roles or set(roles).issuperset(message.roles)
        if message.region != region or not may_have_roles:
            self.num_sender_mismatches += 1
            claimed = f"{', '.join(message.roles)} in region {message.region!r}"
            allowed = f"{', '.join(roles)} in {region!r}"
            raise SenderMismatch(f"{message.process_id} claims {claimed}; its subject is {allowed}")

    def _check(self, message: Message, sender_id: str) -> None:
        if message.sender_id not in (None, sender_id):
            self.num_sender_mismatches += 1
            name = type(message).__name__
            raise SenderMismatch(f"{sender_id} sent a {name} that names {message.sender_id}")
