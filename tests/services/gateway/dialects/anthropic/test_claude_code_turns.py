"""Two turns in the shape of Claude Code: the blocks of the second prompt that the first one had.

What a worker finds in its cache are the leading blocks with equal hashes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from shared.messages import Request
from shared.packing import unpack_hashes, unpack_token_ids
from tests.clients.messages.claude_code import body_of, first_messages, next_messages
from tests.services.gateway import peer
from tests.services.gateway.conftest import Cluster, SharedCluster, running_cluster
from tests.services.gateway.dialects.anthropic.stream import events_of, message_of
from tests.services.gateway.dialects.openai.test_tools_http import TEMPLATE, answers
from tests.support.servers import NatsServer
from tests.support.services.model_dir import write_model_dir

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = 'I look.<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
CHAT_TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
REJECTION = """
{%- for message in messages %}{% if message.role == 'system' and not loop.first %}
{{- raise_exception('system must be first') }}{% endif %}{% endfor %}
"""


@pytest_asyncio.fixture(
    loop_scope="session", scope="module", params=["", REJECTION], ids=["in place", "first alone"]
)
async def wide_cluster(
    request: pytest.FixtureRequest,
    shared_cluster: SharedCluster,
    nats_server: NatsServer,
    gateway_config: GatewayConfig,
    model_files: ModelFiles,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Cluster]:
    """`request.param`: what the template says of system messages after the first."""
    await shared_cluster.close()
    template = CHAT_TEMPLATE + request.param
    path = tmp_path_factory.mktemp("models") / "tiny"
    model_dir = write_model_dir(path, chat_template=template)
    (model_dir / "own.json").write_text(json.dumps(TEMPLATE))
    config = msgspec.structs.replace(
        gateway_config,
        model_dir=model_dir,
        response_template=str(model_dir / "own.json"),
        max_body_bytes=1 << 20,
    )
    card = msgspec.structs.replace(peer.CARD, max_context_tokens=131_072)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "CARD", card)
        async with running_cluster(nats_server, config, model_files) as cluster:
            yield cluster


async def turn(cluster: Cluster, body: dict[str, Any]) -> tuple[dict[str, Any], Request]:
    response = await cluster.http.post("/v1/messages", params={"beta": "true"}, json=body)
    assert response.status_code == 200, response.text
    request = (await cluster.scheduler.submits.get()).request
    return message_of(events_of(response.content)), request


async def test_second_prompt_begins_with_the_first(wide_cluster: Cluster) -> None:
    answers(wide_cluster, CALL)
    messages = first_messages("List the files.")
    message, first = await turn(wide_cluster, body_of(messages, "tiny", 1))
    assert message["stop_reason"] == "tool_use"
    assert message["content"][1]["input"] == {"command": "ls"}
    messages = next_messages(messages, message["content"], "README.md")
    _, second = await turn(wide_cluster, body_of(messages, "tiny", 2))
    num_equal = 0
    for own, other in zip(*map(hashes_of, (first, second)), strict=False):
        if own != other:
            break
        num_equal += 1
    num_tokens = len(unpack_token_ids(second.prompt_token_ids))
    assert num_tokens > 10_000
    assert num_equal * second.block_size >= 0.95 * num_tokens


def hashes_of(request: Request) -> list[bytes]:
    return list(unpack_hashes(request.block_hashes))
