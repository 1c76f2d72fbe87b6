"""System messages after the first, with templates that write them in place and that do not."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.text.chat_template import ChatTemplate
from tests.support.services.model_dir import CHAT_TEMPLATE

REJECTS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
HOISTS = (
    "{% for m in messages if m.role == 'system' %}[system]{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def render(source: str, *messages: tuple[str, str]) -> str:
    template = ChatTemplate(source, special_tokens=(), variables={})
    given: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in messages]
    return "".join(template.render(given, add_generation_prompt=False))


@pytest.mark.parametrize("source", [REJECTS, DROPS, HOISTS])
def test_text_joins_the_user_next_to_it(source: str) -> None:
    first, later = ("system", "s"), ("system", "S")
    assert render(source, first, ("user", "a")) == "[system]s[user]a"
    assert render(source, first, ("user", "a"), later) == "[system]s[user]a\nS"
    assert (
        render(source, ("user", "a"), later, ("assistant", "b"), ("user", "c"))
        == "[user]a\nS[assistant]b[user]c"
    )
    assert (
        render(source, ("user", "a"), ("assistant", "b"), later, ("user", "c"))
        == "[user]a[assistant]b[user]S\nc"
    )
    assert render(source, ("user", "a"), later, ("user", "b")) == "[user]a\nS\nb"
    assert render(source, ("user", "a"), ("user", "b")) == "[user]a[user]b"


def test_prompt_of_the_first_turn_is_the_start_of_the_second() -> None:
    turn = (("system", "s"), ("user", "a"), ("system", "S"))
    second = render(REJECTS, *turn, ("assistant", "b"), ("user", "c"))
    assert second.startswith(render(REJECTS, *turn))


def test_template_that_writes_it_in_place() -> None:
    prompt = render(CHAT_TEMPLATE, ("user", "a"), ("system", "S"), ("user", "b"))
    assert prompt.index("user\na") < prompt.index("system\nS") < prompt.index("user\nb")
