"""`hearth verify`: checks a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import OPERATE, ApiKey, GatewayUrl

app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth verify receipt.json --key keys.json  ·  "
    "hearth verify chatcmpl-… --prompt request.json --replay",
)
def verify(
    receipt: Annotated[
        str,
        typer.Argument(
            metavar="RECEIPT",
            help="A file with a receipt or a gateway's reply (- is standard input), a receipt "
            "itself, or the id of a request.",
        ),
    ],
    salt: Annotated[
        str | None, typer.Option(metavar="SALT", help="Salt of the receipt (default: its file's).")
    ] = None,
    hash_: Annotated[
        str | None,
        typer.Option("--hash", metavar="HASH", help="Hash that the response had in its header."),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Token ids of the prompt; for --replay the request as it was sent."
        ),
    ] = None,
    answer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token ids of the answer.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Public key, as JWK, JWK Set or `x` (default: the gateway's)."
        ),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Compute the answer again, and compare.")
    ] = False,
    url: GatewayUrl = None,
    api_key: ApiKey = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the receipt of a response. Exit status 1: something is wrong; 3: not compared."""
    from services.cli.verify.verify import VerifyOptions, run_verify

    options = VerifyOptions(
        salt=salt,
        hash=hash_,
        prompt=prompt,
        answer=answer,
        key=key,
        is_replay=replay,
        url=url,
        api_key=api_key,
        is_json=is_json,
    )
    raise typer.Exit(run_verify(receipt, options))
