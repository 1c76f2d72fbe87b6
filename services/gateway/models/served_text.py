"""What the gateway needs to prepare and read one model's requests, besides its card."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import msgspec

from services.gateway.grammars.checks import GrammarChecks
from services.gateway.grammars.request_grammars import RequestGrammars
from services.gateway.models.checked_model import CheckedModels
from services.gateway.models.model_source import source_dir
from services.gateway.text.chat_template import TemplateSource
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.preparation_pool import PreparationPool
from services.gateway.text.process_jobs import ProcessSetup
from services.gateway.text.template_renderer import Renderer
from services.gateway.tools.family import Family
from services.gateway.tools.parsing.parsing import ResponseParsing
from shared.messages import ModelCard


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedText:
    """`family`: how the model writes calls and reasoning, for its grammars, parser and call ids."""

    files: ModelFiles
    family: Family
    parsing: ResponseParsing
    renderer: Renderer
    grammars: RequestGrammars


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One revision of a model, for one request."""

    card: ModelCard
    text: ServedText


class TextLoader:
    """Makes `ServedText`s that share the processes. May be called from any thread."""

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
        self._checked = CheckedModels(tool_format)
        self._next_key = count(1).__next__

    def load(self, source: str) -> ServedText:
        """Raises ConfigError for a source that is not here, or an invalid file."""
        model_dir = source_dir(source)
        family = self._checked.family(model_dir)
        files = ModelFiles(model_dir)
        key = str(self._next_key())
        return self.text(files, family, process_setup(files, family, self._tool_format, key=key))

    def text(self, files: ModelFiles, family: Family, setup: ProcessSetup) -> ServedText:
        """Raises ConfigError for a response template that is not valid."""
        return ServedText(
            files,
            family,
            ResponseParsing(family, files.tokenizer.added_ids),
            Renderer(self._renderers, setup),
            RequestGrammars(self._checks, setup),
        )


def process_setup(
    files: ModelFiles, family: Family, tool_format: str, *, key: str = ""
) -> ProcessSetup:
    """What the preparation and check processes need of the model."""
    return ProcessSetup(
        template_source(files, family, tool_format),
        str(files.model_dir),
        files.end_token_ids,
        msgspec.msgpack.encode(family),
        files.tokenizer.added_ids,
        key,
    )


def template_source(files: ModelFiles, family: Family, tool_format: str) -> TemplateSource | None:
    """The model's chat template, with the form of calls that it requires. None: it has none."""
    if files.chat_template is None:
        return None
    source = files.chat_template
    return msgspec.structs.replace(source, call_ids=family.call_ids, tool_format=tool_format)
