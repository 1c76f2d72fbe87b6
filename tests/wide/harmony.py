"""A gpt-oss for agents with long prompts that thinks, calls a tool and answers with its result.

Its weights are a table, as those of `checkpoint.py`, with a memory: a layer attends alike to the
last WINDOW tokens, so that the next token also depends on which REMEMBERED ones are among them.

last token   │ and among the last │ next token
─────────────┼────────────────────┼───────────────────────────────────────────────────────────────
assistant    │                    │ <|channel|>
<|channel|>  │                    │ analysis
<|channel|>  │ the thought's end  │ commentary, whose call the grammar writes
<|channel|>  │ a result's quote   │ final
<|message|>  │ analysis           │ the first of THOUGHT
<|message|>  │ final              │ the first of ANSWER
one of both  │                    │ the next; after the last, <|end|> or <|return|>
<|end|>      │                    │ <|start|>, and then assistant
any other    │                    │ the first allowed of PREFERENCES
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import GptOssConfig, GptOssForCausalLM

from tests.wide.checkpoint import ANSWER, CERTAIN, DEMO_TOKENIZER, GAP, HIDDEN, MAX_POSITIONS
from tests.wide.checkpoint import PREFERENCES as OF_JSON

THOUGHT = "First I look at it!"
WINDOW = 8
START, END, MESSAGE, CHANNEL = (f"<|{each}|>" for each in ("start", "end", "message", "channel"))
RETURN, CALL, CONSTRAIN = (f"<|{each}|>" for each in ("return", "call", "constrain"))
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
WORDS = ("assistant", "analysis", "commentary", "final", '"')
PREFERENCES = (CALL, *OF_JSON[2:])  # as the others', but for the marks of another format
QUOTE = '"'  # which templates write at the end of a result, as JSON
HEAD_DIM, NUM_HEADS = 12, 4
STEP = GAP / 4  # between logits of tokens that may follow one: several quotes are still little

# What published templates write: reasoning before calls only until an answer follows, one call
# with its result.
TEMPLATE = """
{%- if tools %}
{{- '<|start|>developer<|message|># Tools' }}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(answer=-1, name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and not message.tool_calls %}
{%- set last.answer = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.thinking and last.answer < loop.index0 %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set last.name = call.name %}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) ~ '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) ~ '<|end|>' }}
{%- else %}
{{- '<|start|>' ~ message.role ~ '<|message|>' ~ (message.content or '') ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


def write_harmony_checkpoint(folder: Path) -> Path:
    """Takes 3 MB; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in MARKS])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(each) for each in (RETURN, CALL)]
    config = GptOssConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=ends,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(config).eval()
    _write_table(model, tokenizer)
    model.save_pretrained(folder)
    settings = {"chat_template": TEMPLATE, "eos_token": RETURN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": ends, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@torch.no_grad()
def _write_table(model: GptOssForCausalLM, tokenizer: Tokenizer) -> None:
    """Dimension 0 is that of tokens without a row of their own. Each other token of the table has
    one, and each remembered token another, in which the attention shows it.
    """
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.zero_()
    ids = _Ids(tokenizer)
    following, branches, remembered = _table(ids)
    embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
    embeddings[:, 0] = 1.0
    for rank, text in enumerate(reversed(PREFERENCES), start=1):
        head[ids[text], 0] = rank * GAP
    tokens = dict.fromkeys((*following, *branches))
    assert len(tokens) < HIDDEN - 2 * len(remembered)
    for dimension, token in enumerate(tokens, start=1):
        embeddings[token] = torch.eye(HIDDEN)[dimension]
        if token in following:
            head[following[token], dimension] = CERTAIN
        for rank, branch in enumerate(branches.get(token, ())):
            embeddings[token, 0] = 1.0
            head[branch, dimension] = CERTAIN - min(rank, 1) * STEP
    attention = model.model.layers[0].self_attn
    for place, (token, shown) in enumerate(remembered.items()):
        given, found = HIDDEN - 1 - place, HIDDEN - 1 - place - len(remembered)
        embeddings[token, given] = 1.0
        attention.v_proj.weight[place, given] = 1.0
        attention.o_proj.weight[found, place] = 1.0
        head[shown, found] = 5 * STEP  # attention leaves half of it, and a fifth is enough
    model.lm_head.weight /= HIDDEN**0.5  # the norm of a hidden state


class _Ids:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, text: str) -> int:
        (token_id,) = self.of(text)
        return token_id

    def of(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def _table(ids: _Ids) -> tuple[dict[int, int], dict[int, list[int]], dict[int, int]]:
    """Returns the token that follows a token; those of which one follows, the first by default; and
    the remembered tokens, with the one that each lets follow.
    """
    thought, answer = ids.of(THOUGHT), ids.of(ANSWER)
    chains = [
        [*thought, ids[END], ids[START], ids["assistant"], ids[CHANNEL]],
        [*answer, ids[RETURN]],
        *([ids[word], ids[MESSAGE]] for word in ("analysis", "final")),
    ]
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
    following = dict(pairs)
    assert len(following) == len(pairs), "a token of THOUGHT or ANSWER repeats"
    channels = [ids[each] for each in ("analysis", "commentary", "final")]
    branches = {ids[CHANNEL]: channels, ids[MESSAGE]: [thought[0], answer[0]]}
    remembered = {
        thought[-1]: ids["commentary"],
        ids[QUOTE]: ids["final"],
        ids["analysis"]: thought[0],
        ids["final"]: answer[0],
    }
    return following, branches, remembered
