"""Runs `hearth verify`: checks a receipt, and has its answer computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.cli.cluster.chat import find_gateway
from services.cli.output import print_json
from services.cli.verify.comparison import replay_finding
from services.cli.verify.finding import Finding, exit_status
from services.cli.verify.given import (
    GivenReceipt,
    given_json,
    given_keys,
    given_receipt,
    given_salt,
    token_lists,
)
from services.cli.verify.offline import (
    answer_finding,
    hash_finding,
    prompt_finding,
    salt_finding,
    signature_finding,
    summary_lines,
)
from services.cli.verify.replay import ReceiptClient
from shared.errors import ConfigError, DependencyUnavailable
from shared.receipts.jws import PublicJwk, parsed_jws
from shared.receipts.receipt import AnswerReceipt, receipt_of
from shared.receipts.salted import ReceiptSalt


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The user's options; None: not given."""

    salt: str | None = None
    hash: str | None = None
    prompt: Path | None = None
    answer: Path | None = None
    key: str | None = None
    is_replay: bool = False
    url: str | None = None
    api_key: str | None = None
    is_json: bool = False


class VerifiedReceipt(msgspec.Struct, frozen=True):
    """The output of `--json`. Without a valid signature there is no receipt to show."""

    findings: list[Finding]
    receipt: AnswerReceipt | None


def run_verify(text: str, options: VerifyOptions) -> int:
    """Prints the findings. Returns the exit status: 0 if all holds, 1 if anything is wrong, 3 if it
    could not be compared. Raises ConfigError and DependencyUnavailable.
    """
    found = asyncio.run(_Verification(options).verified(text))
    if options.is_json:
        print_json(found)
    else:
        if found.receipt is not None:
            for line in summary_lines(found.receipt):
                print(line)
        for each in found.findings:
            print(each.line)
    return exit_status(found.findings)


class _Verification:
    def __init__(self, options: VerifyOptions) -> None:
        self._options = options
        self._client: ReceiptClient | None = None

    async def verified(self, text: str) -> VerifiedReceipt:
        try:
            return await self._verified(text)
        finally:
            if self._client is not None:
                await self._client.close()

    async def _verified(self, text: str) -> VerifiedReceipt:
        options, given = self._options, await self._given(text)
        jws = parsed_jws(given.jws)
        findings = [signature_finding(jws, await self._keys())]
        expected = given.hash if options.hash is None else options.hash
        if expected is not None:
            findings.append(hash_finding(jws, expected))
        if findings[0].verdict != "ok":
            return VerifiedReceipt(findings, None)
        receipt = receipt_of(jws.payload)
        salt_text = given.salt if options.salt is None else options.salt
        salt = None if salt_text is None else given_salt(salt_text)
        if salt is not None:
            findings.append(salt_finding(receipt, salt))
        findings += await self._content(receipt, salt)
        return VerifiedReceipt(findings, receipt)

    async def _content(self, receipt: AnswerReceipt, salt: ReceiptSalt | None) -> list[Finding]:
        """Checks prompt and answer, which need the salt."""
        options, found = self._options, list[Finding]()
        if options.prompt is None and options.answer is None and not options.is_replay:
            return found
        if salt is None:
            raise ConfigError("--salt is needed: it comes with the receipt, to its tenant alone")
        prompt = None if options.prompt is None else given_json(options.prompt, "--prompt")
        if isinstance(prompt, list):
            found.append(prompt_finding(receipt, salt, token_lists(prompt, "--prompt")))
        elif prompt is not None and not options.is_replay:
            raise ConfigError("--prompt is a request, which --replay checks; or give token ids")
        if options.answer is not None:
            answers = token_lists(given_json(options.answer, "--answer"), "--answer")
            found.append(answer_finding(receipt, salt, answers))
        if options.is_replay:
            if not isinstance(prompt, Mapping):
                raise ConfigError("--replay needs the request, as it was sent: --prompt FILE")
            found.append(await self._replayed(receipt, salt, prompt))
        return found

    async def _replayed(
        self, receipt: AnswerReceipt, salt: ReceiptSalt, body: Mapping[str, Any]
    ) -> Finding:
        try:
            again = await self._gateway().replay(receipt, salt, body)
        except DependencyUnavailable as error:
            return Finding("replay", "open", f"not done: {error.message}")
        return replay_finding(receipt, again)

    async def _given(self, text: str) -> GivenReceipt:
        given = given_receipt(text)
        if isinstance(given, GivenReceipt):
            return given
        found = await self._gateway().receipt(given)
        return GivenReceipt(found.receipt, found.salt, found.hash)

    async def _keys(self) -> tuple[PublicJwk, ...]:
        key = self._options.key
        return (await self._gateway().keys()).keys if key is None else given_keys(key)

    def _gateway(self) -> ReceiptClient:
        if self._client is None:
            place = find_gateway(self._options.url, self._options.api_key)
            self._client = ReceiptClient(place.url, place.api_key, place.certificate)
        return self._client
