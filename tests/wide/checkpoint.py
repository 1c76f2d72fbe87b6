"""A checkpoint for agents with long prompts: 131,072 positions, and weights that are a table.

The attention and the MLP add nothing, so the last token alone decides the next one:

last token                                 │ next token
───────────────────────────────────────────┼──────────────────────────────────────────────────────
end of a prompt with tools, <|offer|>      │ <tool_call>
end of another prompt or result, <|answer|>│ the first of ANSWER
one of ANSWER                              │ the next of ANSWER; after the last, <|end|>
any other                                  │ the first allowed of PREFERENCES

PREFERENCES let a grammar of JSON with named properties end soon: the arguments of a call are those
that the grammar allows, all properties are present, strings are empty unless it demands more.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

DEMO_TOKENIZER = Path(__file__).parents[2] / "shared/demo_model/tokenizer.json"
MAX_POSITIONS = 131_072
ANSWER = "The tool has answered."
OFFER, OPEN, CLOSE, END = "<|offer|>", "<tool_call>", "</tool_call>", "<|end|>"
SPECIAL = ("<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", OPEN, CLOSE, END)
ADDED = (*SPECIAL, OFFER, "<|answer|>")
PREFERENCES = (END, CLOSE, '"', "}", "]", ",", ":", "{", "1", "2", "a")
HIDDEN = 48  # the dimensions of tests/support/engine: they share compiled kernels
GAP = 16.0  # between the logits of two preferences: at a temperature of 1, one in 10^7
CERTAIN = (len(PREFERENCES) + 6) * GAP  # the logit of a token that the table names

TEMPLATE = """
{{- '<|bos|>' -}}
{%- if tools %}
{{- '<|system|>Tools:' -}}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) -}}{%- endfor %}
{{- '<|end|>' -}}
{%- endif %}
{%- for message in messages %}
{{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' ~ (call['function'] | tojson) ~ '</tool_call>' -}}
{%- endfor %}
{{- '<|end|>' -}}
{%- endfor %}
{%- if add_generation_prompt %}
{%- set asks = tools and messages[-1]['role'] != 'tool' %}
{{- '<|assistant|>' ~ ('<|offer|>' if asks else '<|answer|>') -}}
{%- endif %}
"""


def write_wide_checkpoint(folder: Path) -> Path:
    """Takes 2 MB; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id("<|bos|>"),
        eos_token_id=tokenizer.token_to_id(END),
    )
    model = LlamaForCausalLM(config).eval()
    _write_table(model, tokenizer)
    model.save_pretrained(folder)
    settings = {"chat_template": TEMPLATE, "bos_token": "<|bos|>", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@torch.no_grad()
def _write_table(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Each token with a row of its own in the table has a dimension, the others share the first."""
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
    embeddings.zero_()
    embeddings[:, 0] = 1.0
    head.zero_()
    for rank, text in enumerate(reversed(PREFERENCES), start=1):
        head[_token(tokenizer, text)] = rank * GAP
    for dimension, (last, following) in enumerate(_table(tokenizer).items(), start=1):
        embeddings[last].zero_()
        embeddings[last, dimension] = 1.0
        head[following, dimension] = CERTAIN
    model.lm_head.weight /= HIDDEN**0.5  # the norm of a hidden state


def _table(tokenizer: Tokenizer) -> dict[int, int]:
    """The token that follows a token."""
    answer = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    assert len(set(answer)) == len(answer) < HIDDEN - 2, "a token of ANSWER repeats"
    chain = [_token(tokenizer, "<|answer|>"), *answer, _token(tokenizer, END)]
    table = dict(itertools.pairwise(chain))
    return {**table, _token(tokenizer, OFFER): _token(tokenizer, OPEN)}


def _token(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None, text
    return token_id
