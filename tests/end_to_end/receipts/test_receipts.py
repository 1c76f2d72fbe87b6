"""Receipts of real workers: their answers are computed again, with the same tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from services.cli.verify.comparison import replay_finding
from services.cli.verify.given import given_salt
from services.cli.verify.replay import ReceiptClient
from shared.receipts.jws import parsed_jws
from shared.receipts.receipt import AnswerReceipt, receipt_of
from tests.services.cli.in_process import call_hearth
from tests.support.cluster.hearth_up import Cluster
from tests.support.services.receipts import receipt_requests

COUNT, AT_ONCE = 26, 16


async def test_answers_of_receipts_are_computed_again(cluster: Cluster) -> None:
    client = ReceiptClient(cluster.url, cluster.state.api_key)
    slots = asyncio.Semaphore(AT_ONCE)

    async def replayed(path: str, body: dict[str, Any]) -> AnswerReceipt:
        async with slots:
            response = (await client._http.post(path, json=body)).raise_for_status()
            issued = await client.receipt(response.headers["x-request-id"])
            found = receipt_of(parsed_jws(issued.receipt).payload)
            again = await client.replay(found, given_salt(issued.salt), body)
        finding = replay_finding(found, again)
        assert finding.verdict == "ok", (path, body, finding)
        return found

    try:
        found = await asyncio.gather(
            *(replayed(*each) for each in receipt_requests(COUNT, cluster.model))
        )
    finally:
        await client.close()
    tries = [each for receipt in found for prompt in receipt.prompts for each in prompt.tries]
    assert {each.decode.id for each in tries} == {"decode-1"}
    assert any(each.kv_hops and each.kv_hops[0].source.id == "prefill-1" for each in tries)
    outputs = {each.tokens for receipt in found for p in receipt.prompts for each in p.choices}
    assert len(outputs) > COUNT


def test_command_replays_a_request(cluster: Cluster, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 6}
    request, environ = tmp_path / "request.json", {"HOME": str(tmp_path)}
    request.write_text(json.dumps(body))
    response = cluster.client.post("/v1/chat/completions", json=body)
    given = (response.json()["id"], "--hash", response.headers["x-hearth-receipt"])
    place = ("--url", cluster.url, "--api-key", cluster.state.api_key)
    replay = ("--prompt", str(request), "--replay", *place)
    done = call_hearth(("verify", *given, *replay), environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[-4:]] == [
        [each, "ok"] for each in ("signature", "hash", "salt", "replay")
    ]
    request.write_text(json.dumps({**body, "max_tokens": 7}))
    done = call_hearth(("verify", *given, *replay), environ)
    assert done.returncode == 1
    assert "max_tokens of the request differs: 7, in the receipt 6" in done.stdout
