"""The text form of a chat: special tokens, and the template that places them."""

from __future__ import annotations

BOS, USER, ASSISTANT, SYSTEM, END, PAD = SPECIALS = (
    "<|bos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
)

CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
