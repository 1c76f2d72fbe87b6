"""The messages between the gateway and a check process about the grammar of a request."""

from __future__ import annotations

import msgspec

from services.gateway.structured.grammars.answer_grammar import GrammarPlan
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.tools.tool import ToolOptions
from shared.errors import GrammarTooComplex, InvalidRequest


class GrammarRequest(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a request that determine its grammar. `tools` are `ToolOptions` as JSON, which
    allows integers of any size, or empty. `continues_text` means that the output has no markup of
    the model's family.
    """

    output: OutputConstraint | None
    tools: bytes = b""
    continues_text: bool = False


class CheckedPlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan that passed its check. `plan` has no parts. `warnings` name the keywords of the
    client's schemas that the grammar does not enforce.
    """

    plan: GrammarPlan
    warnings: tuple[str, ...] = ()


def encoded_request(
    output: OutputConstraint | None, tools: ToolOptions | None, *, continues_text: bool
) -> bytes:
    """Returns the encoded request; equal grammars have equal bytes. Raises InvalidRequest and
    GrammarTooComplex.
    """
    try:
        options = b"" if tools is None else msgspec.json.encode(_essential(tools))
        return msgspec.msgpack.encode(GrammarRequest(output, options, continues_text))
    except RecursionError:
        raise GrammarTooComplex("the schema is nested too deeply") from None
    except ValueError as error:  # e.g. a lone surrogate
        raise InvalidRequest(f"invalid grammar: {error}") from error


def _essential(tools: ToolOptions) -> ToolOptions:
    """Returns the tools without the fields that no grammar depends on."""
    callable_tools = tuple(msgspec.structs.replace(each, description="") for each in tools.tools)
    return msgspec.structs.replace(tools, tools=callable_tools, offered=())
