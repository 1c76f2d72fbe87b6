"""Reads the gateway's files of a model directory: tokenizer, chat template, sampling defaults.

Anybody may have written them: `models/model_check.py` reads them first, in a process with limits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import structlog
from msgspec import Meta

from services.gateway.text.chat_template import TemplateSource
from services.gateway.text.checkpoint.template_files import Templates, read_templates
from services.gateway.text.tokenizer import PromptTokenizer
from shared.errors import CheckpointError, ConfigError
from shared.messages import NumTokens
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.tokenizer.end_tokens import end_token_ids
from shared.tokenizer.special_tokens import SpecialTokens, read_special_tokens
from shared.tokenizer.tokenizer_text import tokenizer_text
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

T = TypeVar("T")
NO_AND_YES = ("no", "yes")
# The front matter of a model card on Hugging Face's hub.
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_IS_RERANKER = re.compile(r"^pipeline_tag: *['\"]?text-ranking\b", re.MULTILINE)
MAX_CARD_BYTES = 1 << 20
MAX_SHOWN_TOKENS = 8
Share = Annotated[float, Meta(ge=0, le=1)]


class GenerationDefaults(msgspec.Struct, frozen=True):
    """`generation_config.json`: the defaults of requests.

    `do_sample`: false makes greedy decoding the default, whatever the other fields are. A missing
    value, which `generate` of transformers reads as false, has no effect here.
    """

    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_new_tokens: NumTokens | None = None


class RankingTokens(NamedTuple):
    """The tokens with which a reranking checkpoint answers."""

    yes: int
    no: int


class Ranking(msgspec.Struct, frozen=True):
    """Of a checkpoint whose card or configuration calls it a reranker. `tokens`: None if its
    vocabulary has no single ones.
    """

    tokens: RankingTokens | None


class ModelConfig(msgspec.Struct, frozen=True):
    """Of `config.json`. `classifier_from_token`: the texts of no and yes, as vLLM calls them."""

    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    hidden_size: int | None = None
    classifier_from_token: tuple[str, ...] | None = None


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[dict[str, str]] | None = None
    response_template: dict[str, Any] | None = None


class ModelFiles:
    """Raises ConfigError for a missing or invalid file. `chat_template`, `response_template`,
    `ranking`: None if there is none; the template is text, which no process of ours has compiled.
    `token_texts`: of special tokens, by names such as eos_token. `end_token_ids`: of answers.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        config = _read(model_dir / "tokenizer_config.json", _TokenizerConfig)
        templates = read_templates(model_dir, config.chat_template)
        special, text, self.end_token_ids = read_tokenizer(model_dir)
        self.tokenizer = PromptTokenizer(text, templates.text, place=str(model_dir))
        self.defaults = _defaults(model_dir / "generation_config.json")
        self.limits = _read(model_dir / "config.json", ModelConfig)
        self.token_texts = special.texts
        self._report_excess()
        self.response_template = config.response_template
        self.ranking = self._ranking()
        self.chat_template = self._template(templates)
        if self.chat_template is None:
            log.warning("chat_template_missing", model=str(model_dir), effect="chats are refused")

    def _report_excess(self) -> None:
        most = self.limits.vocab_size
        added = self.tokenizer.added_ids
        excess = [] if most is None else [text for text, each in added.items() if each >= most]
        if excess:
            effect = "prompts with them are rejected"
            tokens = sorted(excess)[:MAX_SHOWN_TOKENS]
            log.warning("tokens_beyond_the_model", tokens=tokens, vocab_size=most, effect=effect)

    def _ranking(self) -> Ranking | None:
        """Of a model that answers yes or no to a query and a document."""
        answers = self.limits.classifier_from_token
        if answers is None and not _is_reranker(self.model_dir / "README.md"):
            return None
        found = [self.tokenizer.tokenizer.token_to_id(each) for each in answers or NO_AND_YES]
        match found:
            case [int(no), int(yes)]:
                return Ranking(RankingTokens(yes, no))
        return Ranking(None)

    def _template(self, templates: Templates) -> TemplateSource | None:
        if templates.source is None:
            return None
        return TemplateSource(
            templates.source,
            for_tools=templates.for_tools,
            special_tokens=tuple(self.tokenizer.special_tokens),
            markers=self.tokenizer.markers,
            variables=self.token_texts,
        )


def read_tokenizer(model_dir: Path) -> tuple[SpecialTokens, str, tuple[int, ...]]:
    """The special tokens, the text of `tokenizer.json`, and the ends of answers. Raises
    ConfigError.
    """
    try:
        special = read_special_tokens(model_dir)
        text = tokenizer_text(model_dir, special)
        return special, text, end_token_ids(model_dir, special, text)
    except CheckpointError as error:
        raise ConfigError(error.message) from error


def _is_reranker(card: Path) -> bool:
    """Whether the model card calls the model one that ranks texts."""
    try:
        text = read_checkpoint_file(card, max_bytes=MAX_CARD_BYTES).decode()
        found = _FRONT_MATTER.match(text)
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and _IS_RERANKER.search(found[1]) is not None


def _defaults(path: Path) -> GenerationDefaults:
    """Some exporters write whole numbers as `50.0`."""
    fields = _read(path, dict[str, Any])
    whole = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in fields.items()
    }
    try:
        return msgspec.convert(whole, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _read(path: Path, kind: type[T]) -> T:
    if not exists(path):
        return kind()
    try:
        return msgspec.json.decode(read_checkpoint_file(path), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
