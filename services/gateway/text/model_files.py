"""Reads the gateway's files of a model directory: tokenizer, chat template, sampling defaults.

Anybody may have written them: `models/model_check.py` reads them first, in a process with limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.images.config import ImageConfig, read_image_config
from services.gateway.text.chat_template import TemplateSource
from services.gateway.text.checkpoint.sentence_modules import (
    SentenceModules,
    read_sentence_modules,
)
from services.gateway.text.checkpoint.template_files import Templates, read_templates
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.tokenizer import PromptTokenizer
from shared.errors import CheckpointError, ConfigError
from shared.messages import NumTokens
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.tokenizer.end_tokens import end_token_ids
from shared.tokenizer.special_tokens import SpecialTokens, read_special_tokens
from shared.tokenizer.tokenizer_text import tokenizer_text
from shared.transport.wire_errors import UNREADABLE

T = TypeVar("T")
NO_AND_YES = ("no", "yes")
# The front matter of a model card on Hugging Face's hub.
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_IS_RERANKER = re.compile(r"^pipeline_tag: *['\"]?text-ranking\b", re.MULTILINE)
MAX_CARD_BYTES = 1 << 20
MAX_SHOWN_TOKENS = 8
Share = Annotated[float, Meta(ge=0, le=1)]


class GenerationDefaults(msgspec.Struct, frozen=True):
    """The defaults in `generation_config.json`. `do_sample`: false makes greedy decoding the
    default, whatever the other fields are. A missing value, which `generate` of transformers reads
    as false, has no effect here.
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
    """A checkpoint whose card or configuration calls it a reranker. `tokens`: None if its
    vocabulary has no single tokens for the answers.
    """

    tokens: RankingTokens | None


class TextModelConfig(msgspec.Struct, frozen=True):
    """The fields of `config.json` that the gateway reads. `classifier_from_token`: the texts of no
    and yes, as vLLM calls them.
    """

    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    hidden_size: int | None = None
    classifier_from_token: tuple[str, ...] | None = None


class _TemplateConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[dict[str, str]] | None = None
    response_template: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ModelText:
    """What the gateway's own process needs of a model's files. `chat_template`,
    `response_template`, `ranking`: None if there is none; the template is text, which no process of
    ours has compiled. `token_texts`: of special tokens, by names such as eos_token.
    `end_token_ids`: of answers. `longest_token_chars`: None if there is no bound.
    `max_known_chars`: as of `PromptTokenizer`. `template_file`: an operator's, in place of the
    folder's chat templates; empty: none. `images`: None for a model that takes none.
    `sentence_modules`: None for a checkpoint that is not one of sentence-transformers.
    """

    model_dir: str
    template_file: str
    tokens: TokenTable
    defaults: GenerationDefaults
    limits: TextModelConfig
    token_texts: dict[str, str]
    end_token_ids: tuple[int, ...]
    response_template: dict[str, Any] | None
    ranking: Ranking | None
    chat_template: TemplateSource | None
    longest_token_chars: int | None
    max_known_chars: int
    images: ImageConfig | None
    sentence_modules: SentenceModules | None


class ModelFiles(ModelText):
    """Reads all of a model's files, and loads the tokenizer, which the gateway's own process does
    not. Raises ConfigError for a missing or invalid file.
    """

    def __init__(self, model_dir: Path, template_file: str = "") -> None:
        config = _read(model_dir / "tokenizer_config.json", _TemplateConfig)
        templates = read_templates(model_dir, config.chat_template, template_file)
        special, text, end_token_ids = read_tokenizer(model_dir)
        self.tokenizer = PromptTokenizer(text, templates.text, place=str(model_dir))
        limits = _read(model_dir / "config.json", TextModelConfig)
        super().__init__(
            model_dir=str(model_dir),
            template_file=template_file,
            tokens=self.tokenizer.table(),
            defaults=_defaults(model_dir / "generation_config.json"),
            limits=limits,
            token_texts=special.texts,
            end_token_ids=end_token_ids,
            response_template=config.response_template,
            ranking=_ranking(model_dir, limits, self.tokenizer),
            chat_template=_template(templates, special.texts, self.tokenizer),
            longest_token_chars=self.tokenizer.longest_token_chars,
            max_known_chars=self.tokenizer.max_known_chars,
            images=_images(model_dir),
            sentence_modules=read_sentence_modules(model_dir),
        )
        self._report_excess()
        if self.chat_template is None:
            _warn("chat_template_missing", model=self.model_dir, effect="chats are refused")

    def _report_excess(self) -> None:
        most = self.limits.vocab_size
        added = self.tokens.added_ids
        excess = [] if most is None else [text for text, each in added.items() if each >= most]
        if excess:
            effect = "prompts with them are rejected"
            tokens = sorted(excess)[:MAX_SHOWN_TOKENS]
            _warn("tokens_beyond_the_model", tokens=tokens, vocab_size=most, effect=effect)


def _images(model_dir: Path) -> ImageConfig | None:
    """Returns how the model takes images; None if it takes none, or in no way that is supported."""
    try:
        return read_image_config(model_dir)
    except ConfigError as error:
        _warn("images_refused", model=str(model_dir), reason=error.message)
        return None


def _warn(event: str, **fields: object) -> None:
    import structlog  # 0.06 s, in processes that only tokenize

    structlog.get_logger(__name__).warning(event, **fields)


def prompt_tokenizer(model_dir: Path, template_file: str = "") -> PromptTokenizer:
    """Loads the tokenizer of `ModelFiles` alone. Raises ConfigError."""
    config = _read(model_dir / "tokenizer_config.json", _TemplateConfig)
    templates = read_templates(model_dir, config.chat_template, template_file)
    _, text, _ = read_tokenizer(model_dir)
    return PromptTokenizer(text, templates.text, place=str(model_dir))


def _ranking(
    model_dir: Path, limits: TextModelConfig, tokenizer: PromptTokenizer
) -> Ranking | None:
    """Returns how the model answers yes or no to a query and a document, or None."""
    answers = limits.classifier_from_token
    if answers is None and not _is_reranker(model_dir / "README.md"):
        return None
    found = [tokenizer.tokenizer.token_to_id(each) for each in answers or NO_AND_YES]
    match found:
        case [int(no), int(yes)]:
            return Ranking(RankingTokens(yes, no))
    return Ranking(None)


def _template(
    templates: Templates, variables: dict[str, str], tokenizer: PromptTokenizer
) -> TemplateSource | None:
    if templates.source is None:
        return None
    return TemplateSource(
        templates.source,
        for_tools=templates.for_tools,
        special_tokens=tuple(tokenizer.special_tokens),
        markers=tokenizer.markers,
        variables=variables,
    )


def read_tokenizer(model_dir: Path) -> tuple[SpecialTokens, str, tuple[int, ...]]:
    """Returns the special tokens, the text of `tokenizer.json`, and the end tokens of answers.
    Raises ConfigError.
    """
    try:
        special = read_special_tokens(model_dir)
        text = tokenizer_text(model_dir, special)
        return special, text, end_token_ids(model_dir, special, text)
    except CheckpointError as error:
        raise ConfigError(error.message) from error


def _is_reranker(card: Path) -> bool:
    """Returns whether the model card calls the model one that ranks texts."""
    try:
        text = read_checkpoint_file(card, max_bytes=MAX_CARD_BYTES).decode()
        found = _FRONT_MATTER.match(text)
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and _IS_RERANKER.search(found[1]) is not None


def _defaults(path: Path) -> GenerationDefaults:
    """Reads the defaults; some exporters write whole numbers as `50.0`."""
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
