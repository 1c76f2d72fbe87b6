"""`hearth chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import START, ApiKey, GatewayUrl

app = typer.Typer()


@app.command(
    rich_help_panel=START,
    epilog='Examples:  hearth chat  ·  hearth chat "What is the KV cache?" > answer.txt  ·  '
    "hearth chat --url http://site-a:8000 --api-key KEY"
    "  ·  hearth chat --tools clock,dice  ·  hearth chat --json SCHEMA.json"
    '  ·  hearth chat --image photo.jpg "What is in it?"',
)
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Answer this and end (default: a conversation).")
    ] = None,
    url: GatewayUrl = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model (default: the cluster's first).")
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="System prompt (default: none).")
    ] = "",
    tools: Annotated[
        str, typer.Option(metavar="NAMES", help="Local tools: clock,dice (default: none).")
    ] = "",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Schema of the answers (default: free text)."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Image of the first question; repeat it for several."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print answers and errors alone.")] = False,
) -> None:
    """Chat with a model in this terminal, or print its answer to one question.

    Answers go to standard output, all else to standard error.
    """
    from services.cli.cluster.chat import ChatOptions, run_chat

    options = ChatOptions(
        question=question,
        model=model,
        system=system,
        tools=tools,
        schema=json,
        images=tuple(image or ()),
        is_quiet=quiet,
    )
    run_chat(url, api_key, options)
