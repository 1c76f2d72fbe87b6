"""Grammars of llama.cpp in Lark."""

from __future__ import annotations

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from shared.errors import InvalidRequest


def lark_of(source: str) -> str:
    """Returns a GBNF grammar in Lark; Lark stays as it is. Raises InvalidRequest."""
    try:
        return any_to_lark(source)
    except (GbnfToLarkError, ValueError) as error:
        raise InvalidRequest(f"invalid grammar: {error}") from error
    except RecursionError:
        raise InvalidRequest("invalid grammar: it is nested too deeply") from None
