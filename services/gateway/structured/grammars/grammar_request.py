"""The messages between the gateway and a check process about the grammar of a request."""

from __future__ import annotations

import msgspec

from services.gateway.structured.grammars.answer_grammar import GrammarPlan
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.tools.tool import ToolOptions
from shared.errors import GrammarTooComplex, InvalidRequest


class GrammarRequest(msgspec.Struct, frozen=True, array_like=True):
    """`tools`: `ToolOptions` as JSON, which holds integers of any size; empty: none.
    `continues_text`: the output has no markup of the model's family.
    """

    output: OutputConstraint | None
    tools: bytes = b""
    continues_text: bool = False


class CheckedPlan(msgspec.Struct, frozen=True, array_like=True):
    """`plan`: without its parts. `warnings`: what of the client's schemas the grammar does not
    enforce.
    """

    plan: GrammarPlan
    warnings: tuple[str, ...] = ()


def encoded_request(
    output: OutputConstraint | None, tools: ToolOptions | None, *, continues_text: bool
) -> bytes:
    """Returns equal bytes for equal grammars. Raises InvalidRequest and GrammarTooComplex."""
    try:
        options = b"" if tools is None else msgspec.json.encode(_essential(tools))
        return msgspec.msgpack.encode(GrammarRequest(output, options, continues_text))
    except RecursionError:
        raise GrammarTooComplex("the schema is nested too deeply") from None
    except ValueError as error:  # such as half of a surrogate pair
        raise InvalidRequest(f"invalid grammar: {error}") from error


def _essential(tools: ToolOptions) -> ToolOptions:
    """Returns the tools without the fields that no grammar depends on."""
    callable_tools = tuple(msgspec.structs.replace(each, description="") for each in tools.tools)
    return msgspec.structs.replace(tools, tools=callable_tools, offered=())
