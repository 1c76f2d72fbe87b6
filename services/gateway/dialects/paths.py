"""The roots of the dialects' paths, and the guard of paths that name an account."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from services.gateway.tenancy.errors import ForeignAccount

# Cloudflare's, and the same without its prefix
ACCOUNT_ROOTS = ("/client/v4/accounts/{account:str}/ai", "/accounts/{account:str}/ai")
OPENAI_ROOTS = ("/v1", *(f"{root}/v1" for root in ACCOUNT_ROOTS))


async def check_account(
    connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
) -> None:
    """Raises ForeignAccount if the path names an account other than that of the API key."""
    account = connection.path_params.get("account")
    if account is not None and account != connection.state.tenant.tenant_id:
        raise ForeignAccount("the API key is not of this account")


def openai_paths(path: str) -> list[str]:
    """Returns the paths of OpenAI's API: below /v1, and below /ai/v1 of an account."""
    return [f"{root}{path}" for root in OPENAI_ROOTS]
