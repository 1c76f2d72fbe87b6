"""Fetches images from the hosts that an operator allows.

    address ──allowed?──▶ resolve ──every answer public?──▶ connect to a checked answer ──▶ bytes

The name is resolved once, and the connection goes to an address that was checked: a second answer
of the same name is never used. The certificate must be the name's. Redirects are refused, proxies
of the environment are not used, and nothing of the client's request is sent.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import httpx
import msgspec

from services.gateway.body_budget import BodyBudget, BodyBytes
from services.gateway.images.addresses.allowed_hosts import Address, AllowedHosts, is_public
from services.gateway.images.input_image import InputImage, bad_image
from shared.background import start_awaited
from shared.errors import InvalidRequest

MAX_BYTES = 20 << 20  # of an image
TIMEOUT_S = 10.0  # of an image, from its name to its last byte
STEP_S = 5.0  # to connect, and between two parts
MAX_AT_ONCE, MAX_AT_ONCE_OF_REQUEST = 64, 4
HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "hearth"}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # returns IP addresses


async def resolve(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]


class ImageFetcher:
    def __init__(
        self,
        hosts: AllowedHosts,
        budget: BodyBudget,
        *,
        resolve: Resolve = resolve,
        may_connect: Callable[[str], bool] = is_public,
        context: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`may_connect` decides about an IP address; `context`: of TLS, None: with the usual
        authorities; `timeout_s` and `max_bytes` are of an image.
        """
        self.hosts = hosts
        self._budget = budget
        self._resolve = resolve
        self._may_connect = may_connect
        self._context = context
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    def bytes_of(self, tenant_id: str) -> BodyBytes:
        return self._budget.body(tenant_id)

    async def fetched(
        self, images: Sequence[InputImage], counted: BodyBytes
    ) -> tuple[InputImage, ...]:
        """Returns the images with the bytes of those that have an address. Raises InvalidRequest,
        which names the image, and Overloaded for more bytes than the tenant may have.
        """
        own = asyncio.Semaphore(MAX_AT_ONCE_OF_REQUEST)

        async def one(image: InputImage) -> InputImage:
            if not image.address:
                return image
            address = self.hosts.address_of(image)
            async with own, self._places:
                data = await self._bytes(image, address, counted)
            return msgspec.structs.replace(image, data=data, is_decoded=True, address="")

        tasks = [start_awaited(one(each)) for each in images]
        try:
            return tuple([await each for each in tasks])
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _bytes(self, image: InputImage, address: Address, counted: BodyBytes) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._download(image, address, counted)
        except TimeoutError:
            reason = f"the image has not come within {self._timeout_s:g} s"
        except httpx.TimeoutException:
            reason = f"the image's host sent nothing for {STEP_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
            reason = f"the image cannot be fetched: {type(error).__name__}"
        raise bad_image(image.place, reason)

    async def _download(self, image: InputImage, address: Address, counted: BodyBytes) -> bytes:
        (scheme, host, port), target = address
        ip = await self._checked_ip(image, host, port)
        shown = f"[{ip}]" if ":" in ip else ip
        default = {"https": 443, "http": 80}[scheme]
        named = host if port == default else f"{host}:{port}"
        if self._context is None:  # reads some hundred certificates
            self._context = await asyncio.to_thread(httpx.create_ssl_context)
        async with (
            httpx.AsyncClient(
                verify=self._context,
                trust_env=False,
                follow_redirects=False,
                timeout=STEP_S,
                headers=HEADERS,
            ) as client,
            client.stream(
                "GET",
                f"{scheme}://{shown}:{port}{target}",
                headers={"host": named},
                extensions={"sni_hostname": host},
            ) as response,
        ):
            self._check(image, response)
            data = bytearray()
            async for part in response.aiter_raw():
                if len(data) + len(part) > self._max_bytes:
                    raise self._too_large(image)
                counted.add(len(part))
                data += part
            return bytes(data)

    async def _checked_ip(self, image: InputImage, host: str, port: int) -> str:
        """Returns the first address of a host all of whose addresses may be connected to."""
        found = await self._resolve(host, port)
        refused = [each for each in found if not self._may_connect(each)]
        if refused or not found:
            # the address itself would describe the operator's network
            raise bad_image(image.place, f"{host[:128]} is not a host of the public internet")
        return found[0]

    def _check(self, image: InputImage, response: httpx.Response) -> None:
        """Raises InvalidRequest for a response without an image in its body."""
        if response.is_redirect:
            raise bad_image(image.place, "the image's host redirects, which is not followed")
        if response.status_code != 200:
            raise bad_image(image.place, f"the image's host answers {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise bad_image(image.place, "the image's host compresses what it sends")
        with suppress(ValueError):
            if int(response.headers.get("content-length", "0")) > self._max_bytes:
                raise self._too_large(image)

    def _too_large(self, image: InputImage) -> InvalidRequest:
        return bad_image(image.place, f"the image has more than {self._max_bytes} bytes")
