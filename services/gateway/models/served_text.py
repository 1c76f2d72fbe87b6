"""The parts of a model, besides its card, with which the gateway prepares requests and reads
output.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from weakref import finalize

import msgspec

from services.gateway.models.checked_model import checked_model
from services.gateway.models.encoding_pools import EncodingPools
from services.gateway.models.model_check import CheckedModel
from services.gateway.models.model_source import source_dir
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.preparation.template_renderer import Renderer
from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.structured.grammars.request_grammars import RequestGrammars
from services.gateway.structured.grammars.thinking import Spellings
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.parsing.parsing import ResponseParsing
from services.gateway.text.chat_template import TemplateSource
from services.gateway.text.model_files import ModelText
from services.gateway.text.process_jobs import ProcessSetup
from shared.messages import ModelCard


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedText:
    """`family`: how the model writes calls and reasoning, for its grammars, parser and call ids.
    `spellings`: the marks of its reasoning. The text's process ends when nothing refers to it.
    """

    files: ModelText
    family: Family
    spellings: Spellings
    parsing: ResponseParsing
    renderer: Renderer
    grammars: RequestGrammars


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One revision of a model, for one request."""

    card: ModelCard
    text: ServedText


class TextLoader:
    """Makes `ServedText`s, which share processes. May be used by any thread. `encoding`: the
    processes that they do not share.
    """

    def __init__(
        self,
        renderers: PreparationPool,
        checks: GrammarChecks,
        *,
        tool_format: str,
    ) -> None:
        self._renderers = renderers
        self._checks = checks
        self._tool_format = tool_format
        self.encoding = EncodingPools()
        self._next_key = count(1).__next__

    def load(self, source: str) -> ServedText:
        """Reads a source. Raises ConfigError for a source that is not on this machine, or an
        invalid file.
        """
        model = checked_model(source_dir(source), "", self._tool_format)
        return self.text(model, process_setup(model, self._tool_format, key=str(self._next_key())))

    def text(self, model: CheckedModel, setup: ProcessSetup) -> ServedText:
        """Makes the text of read files. Raises ConfigError for an invalid response template."""
        parsing = ResponseParsing(model.family, model.text.tokens.added_ids)
        most = model.text.max_known_chars
        encoding = self.encoding.open() if most else None
        renderer = Renderer(self._renderers, setup, encoding, max_known_chars=most)
        text = ServedText(
            model.text,
            model.family,
            model.spellings,
            parsing,
            renderer,
            RequestGrammars(self._checks, setup),
        )
        if encoding is not None:
            finalize(text, self.encoding.end, encoding)
        return text


def process_setup(model: CheckedModel, tool_format: str, *, key: str = "") -> ProcessSetup:
    """Returns what the preparation and check processes need of the model."""
    files = model.text
    return ProcessSetup(
        template_source(files, model.family, tool_format),
        files.model_dir,
        files.end_token_ids,
        msgspec.msgpack.encode(model.family),
        files.tokens.added_ids,
        key,
        files.template_file,
    )


def template_source(files: ModelText, family: Family, tool_format: str) -> TemplateSource | None:
    """Returns the model's chat template with the form of calls that it requires, or None."""
    if files.chat_template is None:
        return None
    source = files.chat_template
    return msgspec.structs.replace(source, call_ids=family.call_ids, tool_format=tool_format)
