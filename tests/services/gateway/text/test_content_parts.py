"""Contents in the form that a template expects: a text, or a list of parts."""

from __future__ import annotations

import itertools

import pytest

from services.gateway.text.chat_template import ChatTemplate, LiteralText

SYSTEM, USER = {"role": "system", "content": "sys"}, {"role": "user", "content": "<|hi|>"}
ANSWER = {"role": "assistant", "content": "yes"}
LATE = {"role": "system", "content": "late"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LOOP = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
EACH = "{% for m in messages %}<|{{ m.role }}|>"
END = "{% endfor %}"
BY_LOOP = EACH + LOOP + END
FILTERED = (
    EACH + "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
    "{% endfor %}" + END
)
FIRST = EACH + "{{ m.content[0].text }}" + END
EITHER = EACH + "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}" + END
USERS_ONLY = (
    EACH + "{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content | trim }}{% endif %}" + END
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + BY_LOOP
)
TEXTS = EACH + "{{ m.content }}" + END


def rendered(source: str, *messages: dict[str, object]) -> str:
    template = ChatTemplate(source, special_tokens=["<|hi|>"], variables={})
    parts = template.render(messages)
    literal = [part for part in parts if isinstance(part, LiteralText)]
    assert literal == ["<|hi|>"] * "".join(parts).count("<|hi|>")
    return "".join(parts)


@pytest.mark.parametrize("source", [BY_LOOP, FILTERED, FIRST, EITHER, USERS_ONLY, TEXTS])
def test_no_text_is_lost(source: str) -> None:
    expected = "<|system|>sys<|user|><|hi|><|assistant|>yes<|user|><|hi|>"
    assert rendered(source, SYSTEM, USER, ANSWER, USER) == expected


def test_template_that_rejects_a_probe() -> None:
    assert rendered(STRICT, USER, ANSWER) == "<|user|><|hi|><|assistant|>yes"


@pytest.mark.parametrize("source", [BY_LOOP, TEXTS])
def test_late_system_messages_and_calls(source: str) -> None:
    assert rendered(source, USER, LATE, USER) == "<|user|><|hi|><|system|>late<|user|><|hi|>"
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "1", "tool_call_id": "call00000"}
    known = source + "{# tool_calls #}"
    assert rendered(known, USER, calls, result) == "<|user|><|hi|><|assistant|><|tool|>1"


def test_every_role_by_itself() -> None:
    """Each set of roles whose parts a template loops over."""
    for number in range(3):
        for roles in itertools.combinations(("system", "user", "assistant"), number + 1):
            source = (
                f"{EACH}{{% if m.role in {list(roles)} %}}{LOOP}{{% else %}}{{{{ m.content }}}}"
            )
            source += "{% endif %}" + END
            assert rendered(source, SYSTEM, USER, ANSWER).endswith("<|hi|><|assistant|>yes")
