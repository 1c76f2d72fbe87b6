"""Cloudflare's SDK: JSON mode and tools of Workers AI."""

from __future__ import annotations

import json

from cloudflare import Cloudflare

from tests.support.account import AGENT_MODEL, Account

MESSAGES = [{"role": "user", "content": "What time is it in Berlin?"}]
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"type": "string"}, "hour": {"type": "integer"}},
    "required": ["zone", "hour"],
    "additionalProperties": False,
}
TOOL = {"name": "clock", "description": "The time in a zone.", "parameters": SCHEMA}


def run(account: Account, **options) -> dict:
    with Cloudflare(api_token=account.token, base_url=account.v4, max_retries=0) as client:
        return client.ai.run(AGENT_MODEL, account_id=account.id, messages=MESSAGES, **options)


def test_json_mode(account: Account) -> None:
    answer = run(account, response_format={"type": "json_schema", "json_schema": SCHEMA})
    response = answer["response"]
    value = json.loads(response) if isinstance(response, str) else response
    assert value.keys() == {"zone", "hour"} and isinstance(value["hour"], int)


def test_tools(account: Account) -> None:
    for tool in (TOOL, {"type": "function", "function": TOOL}):
        [call] = run(account, tools=[tool])["tool_calls"]
        assert call["name"] == "clock" and call["arguments"].keys() == {"zone", "hour"}
