"""Receipts of a cluster with a model, whose answers are computed again."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.report import Bar, Row, at_least, at_most
from services.cli.verify.comparison import replay_finding
from services.cli.verify.finding import Finding
from services.cli.verify.given import given_salt
from services.cli.verify.offline import salt_finding, signature_finding
from services.cli.verify.replay import ReceiptClient
from services.client.chat_request import gateway_client
from shared.receipts.jws import PublicJwk, parsed_jws
from shared.receipts.receipt import (
    AnswerReceipt,
    IssuedReceipt,
    decoded_bytes,
    encoded_bytes,
    receipt_of,
)
from shared.receipts.salted import ReceiptSalt
from tests.support.cluster.hearth_up import run_cluster
from tests.support.services.receipts import receipt_requests

MANIPULATIONS = ("token", "region", "weights", "time", "salt")
SHOWN_EVERY = 1000


@dataclass
class Counts:
    verdicts: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def record(self, receipt: AnswerReceipt, finding: Finding) -> None:
        self.verdicts[finding.verdict] += 1
        choices = (each for prompt in receipt.prompts for each in prompt.choices)
        self.num_tokens += sum(each.num_tokens for each in choices)
        if finding.verdict != "ok":
            self.faults.append(f"{receipt.endpoint} {receipt.request_id}: {finding.text}")


async def replays(options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    with tempfile.TemporaryDirectory() as folder, run_cluster(Path(folder)) as cluster:
        requests, counts = receipt_requests(options.count, cluster.model), Counts()
        started = time.perf_counter()
        async with gateway_client(cluster.url, cluster.state.api_key) as http:
            client = ReceiptClient(cluster.url, cluster.state.api_key)
            try:
                await _all(http, client, requests, counts, options.at_once)
            finally:
                await client.close()
        elapsed_s = time.perf_counter() - started
    for fault in counts.faults[:10]:
        print(fault, file=sys.stderr)
    row: Row = {"receipts": options.count, "tokens": counts.num_tokens}
    row |= {"same": counts.verdicts["ok"], "different": counts.verdicts["wrong"]}
    row |= {"not_compared": counts.verdicts["open"], "seconds": round(elapsed_s, 1)}
    row |= {f"{name}_found": counts.found[name] for name in MANIPULATIONS}
    return [row], _bars_of(options.count, counts)


async def _all(
    http: httpx.AsyncClient,
    client: ReceiptClient,
    requests: Sequence[tuple[str, dict[str, Any]]],
    counts: Counts,
    at_once: int,
) -> None:
    keys, slots = (await client.keys()).keys, asyncio.Semaphore(at_once)

    async def one(path: str, body: dict[str, Any]) -> None:
        async with slots:
            response = (await http.post(path, json=body)).raise_for_status()
            issued = await client.receipt(response.headers["x-request-id"])
            receipt, salt = receipt_of(parsed_jws(issued.receipt).payload), given_salt(issued.salt)
            counts.record(
                receipt, replay_finding(receipt, await client.replay(receipt, salt, body))
            )
        for name in MANIPULATIONS:
            counts.found[name] += _is_found(name, issued, salt, keys)
        if not counts.verdicts.total() % SHOWN_EVERY:
            print(f"{counts.verdicts.total()} receipts", file=sys.stderr)

    await asyncio.gather(*(one(*each) for each in requests))


def _is_found(
    name: str, issued: IssuedReceipt, salt: ReceiptSalt, keys: Sequence[PublicJwk]
) -> bool:
    """Whether a receipt with one change is told from the true one, which must hold."""
    true = parsed_jws(issued.receipt)
    if signature_finding(true, keys).verdict != "ok":
        return False
    receipt = receipt_of(true.payload)
    if name == "salt":
        changed_salt = ReceiptSalt(bytes([salt.salt[0] ^ 1, *salt.salt[1:]]))
        return salt_finding(receipt, changed_salt).verdict == "wrong"
    head, _, signature = issued.receipt.split(".")
    payload = _changed(receipt, name)
    changed = parsed_jws(f"{head}.{encoded_bytes(payload)}.{signature}")
    return signature_finding(changed, keys).verdict == "wrong"


def _changed(receipt: AnswerReceipt, name: str) -> bytes:
    plain = msgspec.to_builtins(receipt)
    prompt = plain["prompts"][0]
    match name:
        case "token":
            before = decoded_bytes(prompt["choices"][0]["tokens"])
            prompt["choices"][0]["tokens"] = encoded_bytes(bytes([before[0] ^ 1, *before[1:]]))
        case "region":
            prompt["tries"][0]["decode"]["region"] += "x"
        case "weights":
            plain["model"]["weights"] += "x"
        case "time":
            plain["received_at"] += 0.001
    return msgspec.json.encode(plain)


def _bars_of(count: int, counts: Counts) -> list[Bar]:
    found = [
        at_least(f"receipts whose changed {name} is found", counts.found[name], count, "receipts")
        for name in MANIPULATIONS
    ]
    different = at_most("answers that differ", counts.verdicts["wrong"], 0, "answers")
    return [
        at_least("answers that are the same", counts.verdicts["ok"], count, "answers"),
        different,
        *found,
    ]
