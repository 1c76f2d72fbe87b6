"""Our environment of chat templates beside that of transformers, and what both render."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import pytest

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.checkpoint.template_environment import template_environment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.utils import chat_template_utils as reference

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "time & <zone>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief — “very”."}
CHAT = [
    SYSTEM,
    {"role": "user", "content": " What is\nthis? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA test."},
    {"role": "user", "content": "And {{ that }}?"},
]
FORMS = (
    # ChatML, whose answers are marked for training
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}\n{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # headers, a date, tools with indents
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b') %}{% endif %}"
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content|trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start|>{{ system }} {{ today | length > 3 }}\n"
    "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}"
    "{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|eot|>{% endfor %}",
    # roles that alternate, with an index that a namespace counts
    "{% set ns = namespace(turn=0, last=none) %}{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% set ns.last = loop.index0 %}"
    "[{{ 'INST' if m.role == 'user' else 'OUT' }}] {{ m.content }}{{ loop.last }}"
    "{% endfor %}{{ ns.turn }}/{{ ns.last }}",
    # reasoning of earlier answers cut off, loop controls
    "{%- for m in messages %}{%- if m.role == 'system' %}{% continue %}{% endif %}"
    "{%- set text = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else "
    "m.content %}<{{ m.role[:1] | upper }}>{{ text }}{% if loop.index > 6 %}{% break %}{% endif %}"
    "{%- endfor %}",
    # macros, dicts, recursion, filters over lists
    "{% macro turn(m, names=dict(user='U', assistant='A')) %}{{ names.get(m.role, '?') }}:"
    "{{ m.content | replace('\n', ' ') }}{{ caller() if caller else '' }};{% endmacro %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
    "{% for m in messages | reverse %}{{ turn(m) }}{% endfor %}"
    "{% for k, v in dict(a=1, b=[2]).items() %}{{ k }}={{ v | tojson }}{% endfor %}"
    "{{ dict.fromkeys(['x'], 0) }}{{ range(3) | list }}{{ cycler('a', 'b').next() }}",
    # white space control and a body of several lines
    "{%- for m in messages %}\n    {% generation %}\n      {% set x = m.content %}\n  {{ x }}\n"
    "    {% endgeneration %}\n{{ x is defined }}\n{% endfor %}",
    # an attribute that is none of its own
    "{% set ns = namespace(_x=1) %}{{ messages | length }}",
    "{{ dict.mro() }}",
    "{{ tools | map(attribute='function') | map(attribute='name') | list if tools else '' }}"
    "{{ messages[-1].content | tojson(ensure_ascii=True, separators=(',', ':')) }}",
)


def rendered_by_both(source: str, tools: list[dict[str, Any]]) -> tuple[str | None, str | None]:
    texts: list[str | None] = []
    for render in (_ours, _theirs):
        try:
            texts.append(render(source, tools))
        except Exception:
            texts.append(None)
    return texts[0], texts[1]


def _ours(source: str, tools: list[dict[str, Any]]) -> str:
    template = ChatTemplate(source, special_tokens=(), variables={"bos_token": "<s>"})
    return "".join(template.render(CHAT, tools if template.takes_tools else ()))


def _theirs(source: str, tools: list[dict[str, Any]]) -> str:
    (text,), _ = reference.render_jinja_template(
        [CHAT],
        tools=tools or None,
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
    )
    return str(text)


def test_has_what_transformers_has() -> None:
    ours = template_environment(datetime.datetime.now)
    theirs = reference._compile_jinja_template("").environment
    for kind in ("filters", "tests", "globals", "policies"):
        assert getattr(ours, kind).keys() == getattr(theirs, kind).keys()
    assert tags(ours) == tags(theirs)
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape"):
        assert getattr(ours, name) == getattr(theirs, name)


def tags(environment: Any) -> set[str]:
    return {tag for each in environment.extensions.values() for tag in each.tags}


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("source", FORMS, ids=range(len(FORMS)))
def test_renders_what_transformers_renders(source: str, tools: list[dict[str, Any]]) -> None:
    ours, theirs = rendered_by_both(source, tools)
    assert ours == theirs
