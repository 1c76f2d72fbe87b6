"""The tokenizer, the chat template and the prompts of SmolVLM's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_vision_training.questions import Case, case

TILE, PATCH, SCALE = 64, 8, 2
TOKENS_PER_TILE = (TILE // PATCH // SCALE) ** 2
VOCAB_SIZE = 512
BOS, END, PAD, IMAGE = "<|im_start|>", "<end_of_utterance>", "<pad>", "<image>"
AROUND, GLOBAL = "<fake_token_around_image>", "<global-img>"
SPECIALS = (PAD, BOS, END, IMAGE, AROUND, GLOBAL)
# That of SmolVLM.
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PLACEHOLDER = f"{AROUND}{GLOBAL}{IMAGE * TOKENS_PER_TILE}{AROUND}"


def train_tokenizer(num_cases: int = 3000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    turns = [turn for number in range(num_cases) for turn in case(number).turns]
    texts = [f"User:{question}\nAssistant: {answer}" for question, answer in turns]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(each, normalized=False) for each in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prompt_of(each: Case) -> str:
    """Returns the prompt of the first question."""
    pictures = PLACEHOLDER * len(each.images)
    return f"{BOS}User:{pictures}{each.question}{END}\nAssistant:"


def parts_of(each: Case) -> list[tuple[str, str]]:
    """Returns a conversation with all questions as prompts and the answers that follow them."""
    first, *later = each.turns
    prompts = [prompt_of(each), *(f"\nUser: {asked}{END}\nAssistant:" for asked, _ in later)]
    return [
        (prompt, f" {answer}{END}")
        for prompt, (_, answer) in zip(prompts, [first, *later], strict=True)
    ]


def write_text_files(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Writes what a gateway reads besides the config."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": context,
        },
    )
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": TILE},
            "max_image_size": {"longest_edge": TILE},
            "resample": 1,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "rescale_factor": 1 / 255,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
