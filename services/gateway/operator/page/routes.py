"""The routes of `GET /` and of the page's files."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response
from litestar.exceptions import NotFoundException

from services.gateway.operator.page.files import INDEX, PageFile, read_files
from services.gateway.operator.page.headers import SECURITY_HEADERS


class PageRoutes:
    def __init__(self) -> None:
        self._files = read_files()

    async def index(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        return _response(self._files[INDEX], request)

    async def file(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        found = self._files.get(str(request.path_params["name"]))
        if found is None:
            raise NotFoundException
        return _response(found, request)


def _response(file: PageFile, request: Request[Any, Any, Any]) -> Response[bytes]:
    """Returns the file, or 304 if the client's copy is current. Clients revalidate each time, so
    that a new release is shown at once.
    """
    is_fresh = file.is_fresh(request.headers.get("if-none-match", ""))
    headers = {**SECURITY_HEADERS, "etag": file.etag, "cache-control": "no-cache"}
    return Response(
        b"" if is_fresh else file.data,
        status_code=304 if is_fresh else 200,
        headers=headers,
        media_type=file.media_type,
    )
