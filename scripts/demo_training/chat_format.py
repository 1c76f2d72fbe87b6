"""The text form of a chat: special tokens, and the template that places them."""

from __future__ import annotations

from typing import Any

BOS, USER, ASSISTANT, SYSTEM, END, PAD = SPECIALS = (
    "<|bos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
)
# The last ids of the vocabulary, so that the tools leave the ids of all other tokens as they were.
CALL, CALL_END, TOOL = TOOL_SPECIALS = ("<tool_call>", "</tool_call>", "<|tool|>")

# A tool is shown by its name, its description and the types of its parameters, since the model has
# few tokens to spare for JSON schemas; the full schema is for the grammar of its arguments.
CHAT_TEMPLATE = """\
{%- macro type_of(schema) -%}
{{- (schema['type'] if schema is mapping and 'type' in schema else 'any') | tojson -}}
{%- endmacro -%}
{%- macro tool_line(function) -%}
{{- '\\n{"name": ' ~ (function['name'] | tojson) ~ ', "description": ' -}}
{{- (function['description'] or '') | tojson -}}
{{- ', "parameters": {' -}}
{%- for name, schema in ((function['parameters'] or {})['properties'] or {}).items() -%}
{{- (name | tojson) ~ ': ' ~ type_of(schema) ~ ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- '}}' -}}
{%- endmacro -%}
{%- macro tool_lines() -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}{{- tool_line(tool['function']) -}}{%- endfor -%}
{%- endmacro -%}
{{- '<|bos|>' -}}
{%- if tools and (not messages or messages[0]['role'] != 'system') -%}
{{- '<|system|>' ~ tool_lines() ~ '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{%- set calls = message['tool_calls'] or [] -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{{- ('' if calls and message['content'] is none else message['content']) | trim -}}
{%- if tools and loop.first and message['role'] == 'system' -%}
{{- '\\n' ~ tool_lines() -}}
{%- endif -%}
{%- for call in calls -%}
{{- '<tool_call>{"name": ' ~ (call['function']['name'] | tojson) ~ ', "arguments": ' -}}
{{- (call['function']['arguments'] | tojson) ~ '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

# The format of transformers, which reads content and calls from the text of an answer with it.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "content": {"close": END, "content": "text"},
        "tool_calls": {
            "open": CALL,
            "close": CALL_END,
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
