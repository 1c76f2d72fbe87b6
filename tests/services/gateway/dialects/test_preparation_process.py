"""A preparation process with a model's tokenizer."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import msgspec
import pytest

from services.gateway.dialects.preparation_process import BODY_NICENESS
from services.gateway.models.preparation_pools import PREPARATION_PROCESS
from services.gateway.models.served_text import template_source
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.preparation.template_renderer import Renderer
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.text.chat_template import TemplateSource
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, ProcessSetup
from shared.config import GatewayConfig, check
from shared.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hello"}]
LARGE = json.dumps({"messages": MESSAGES * 4000}).encode()
LOWEST = 19
NEVER_S = 3600.0


def cpu_ns(pid: int) -> dict[int, int]:
    """CPU nanoseconds of each thread of a process, by its niceness."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {
        os.getpriority(os.PRIO_PROCESS, int(each.name)): int(
            (each / "schedstat").read_text().split()[0]
        )
        for each in threads
    }


async def test_large_bodies_are_prepared_at_a_lower_priority_than_small_requests(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    low = min(LOWEST, own + BODY_NICENESS)
    assert model_files.chat_template is not None
    setup = ProcessSetup(model_files.chat_template, str(gateway_config.model_dir))
    pool = PreparationPool(
        setup, num_processes=1, module=PREPARATION_PROCESS, spare_delay_s=NEVER_S, hang_s=600.0
    )
    renderer = Renderer(pool, setup)
    try:
        job = BodyJob("chat", LARGE)
        (prompt,) = (await renderer.prepare_body(job, tenant_id="acme")).prompts
        (pid,) = pool.process_ids
        before = cpu_ns(pid)
        assert (await renderer.prepare_body(job, tenant_id="acme")).prompts == [prompt]
        used = {niceness: ns - before[niceness] for niceness, ns in cpu_ns(pid).items()}
        assert set(used) == {own, low}
        assert used[low] > used[own]
        idle = cpu_ns(pid)
        assert await renderer.render(MESSAGES)
        # A thread that has answered runs a little longer until it waits for its next body.
        assert cpu_ns(pid)[low] - idle[low] < used[low] / 10
    finally:
        await pool.close()


def _template(files: ModelFiles, config: GatewayConfig) -> TemplateSource | None:
    family = family_of(files, config.response_template, tool_format=config.tool_format)
    return template_source(files, family, config.tool_format)


def test_processes_render_calls_as_the_template_and_the_operator_require(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    files = copy.copy(model_files)
    found = _template(files, gateway_config)
    assert found is not None and (found.call_ids, found.tool_format) == ("own", "template")
    source = "{{ tools }}<|tool_calls_section_begin|><|tool_call_argument_begin|>"
    files.chat_template = TemplateSource(source, (), {})
    as_text = msgspec.structs.replace(gateway_config, tool_format="hermes")
    found = _template(files, as_text)
    assert found is not None and (found.call_ids, found.tool_format) == ("kimi", "hermes")
    files.chat_template = None
    assert _template(files, gateway_config) is None


def test_unknown_tool_format_is_named(gateway_config: GatewayConfig) -> None:
    with pytest.raises(ConfigError, match="tool_format 'xml' is none of template, hermes"):
        check(msgspec.structs.replace(gateway_config, tool_format="xml"))
