# SPDX-License-Identifier: Apache-2.0
"""Fetching a client's media over HTTP without being led astray.

The address is checked when the socket is made, after name resolution, and the socket is connected
to that very address: neither a name that resolves to a private address, nor one that resolves to
another address the second time, nor a redirect gets through. TLS still checks the name.
"""

import asyncio
import functools
import socket
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
import requests
from aiohttp.abc import AbstractResolver
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.utils.mem_constants import MiB_bytes
from yarl import URL

from vllm_omni.entrypoints.openai.addresses import AddressPolicy
from vllm_omni.entrypoints.openai.media_budget import MediaBudget

MAX_REDIRECTS = 5
DEFAULT_TIMEOUT_S = 30.0
_FIRST_PAUSE_S = 0.2
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_ANY_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32


class FetchError(OSError):
    """The medium cannot be had; says why, without saying where from."""


class _TransientError(FetchError):
    """It may work another time."""


class AddressRefusedError(OSError):
    """The URL leads to an address that must not be reached."""

    def __init__(self) -> None:
        super().__init__("its address is not a public one")


@dataclass(frozen=True)
class FetchSettings:
    """What media URLs may lead to.

    Attributes:
        policy: Which addresses.
        domains: Which hosts; all if empty.
        resolver: What resolves names; aiohttp's own, in a thread, if None.
    """

    policy: AddressPolicy = field(default_factory=AddressPolicy)
    domains: Sequence[str] = ()
    resolver: AbstractResolver | None = None


class GuardedConnection(HTTPConnection):
    """vLLM's HTTP client with checks of every hop. It keeps nothing between fetches.

    With a proxy in the environment it is the proxy that resolves names and that decides; only
    addresses written in the URL itself are checked then.

    Args:
        settings: What may be reached.
        budget: What the request may still fetch.
    """

    def __init__(self, settings: FetchSettings, budget: MediaBudget) -> None:
        super().__init__()
        self._settings = settings
        self._budget = budget

    async def async_get_bytes(  # type: ignore[override]
        self,
        url: str,
        *,
        timeout: float | None = None,
        allow_redirects: bool = True,
        max_bytes: int | None = None,
    ) -> bytes:
        """The body of a URL.

        Args:
            url: http or https.
            timeout: Seconds for all of it: every hop, every retry and the whole body.
            allow_redirects: Follow up to `MAX_REDIRECTS`.
            max_bytes: Bound on the body, decompressed; VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB holds too.

        Raises:
            FetchError: It cannot be had.
        OmniClientError: The request has fetched too much.
            aiohttp.ClientError: The connection or TLS failed.
        """
        seconds = timeout or DEFAULT_TIMEOUT_S
        hops = MAX_REDIRECTS if allow_redirects else 0
        try:
            async with asyncio.timeout(seconds):
                return await self._get_patiently(URL(url), hops, _download_limit(max_bytes))
        except TimeoutError:
            raise FetchError(f"it took longer than {seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise FetchError(_reason(error)) from error

    def get_sync_client(self) -> requests.Session:
        """Not used by the server, which is asynchronous throughout."""
        raise NotImplementedError

    async def _get_patiently(self, url: URL, hops: int, max_bytes: int | None) -> bytes:
        for attempt in range(max(envs.VLLM_MEDIA_FETCH_MAX_RETRIES, 1) - 1):
            try:
                return await self._get(url, hops, max_bytes)
            except (_TransientError, aiohttp.ClientConnectionError) as error:
                if _is_refused(error):
                    raise
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        return await self._get(url, hops, max_bytes)

    async def _get(self, url: URL, hops: int, max_bytes: int | None) -> bytes:
        for _ in range(hops + 1):
            self._check(url)
            proxy = _proxy_for(url)
            async with (
                self._session(direct=proxy is None) as session,
                session.get(url, allow_redirects=False, proxy=proxy) as reply,
            ):
                location = reply.headers.get("Location")
                if reply.status not in _REDIRECTS or location is None:
                    return await _body(reply, max_bytes, self._budget)
                url = _joined(url, location)
        raise FetchError(f"it redirects more than {hops} times" if hops else "it redirects")

    def _check(self, url: URL) -> None:
        """What can be told before a name is resolved."""
        if url.scheme not in ("http", "https") or not url.host:
            raise FetchError("it leads to what is no http or https URL")
        domains = self._settings.domains
        if domains and not {url.host, url.raw_host} & set(domains):
            raise FetchError(f"host {url.host!r} is not among the allowed domains")
        if _is_address(url.host) and not self._settings.policy.allows(url.host):
            raise AddressRefusedError

    def _session(self, direct: bool) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._settings.resolver,
            use_dns_cache=False,
            socket_factory=functools.partial(_socket, self._settings.policy) if direct else None,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers(**{"Accept-Encoding": "identity"}),
            auto_decompress=False,
            trust_env=False,  # no credentials from ~/.netrc
            timeout=aiohttp.ClientTimeout(total=None),
        )


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, AddressRefusedError
    )


def _reason(error: aiohttp.ClientError) -> str:
    """Why a fetch failed, without the addresses that the client need not know."""
    if _is_refused(error):
        return str(AddressRefusedError())
    match error:
        case aiohttp.InvalidURL():
            return "its URL is not valid"
        case aiohttp.ClientConnectorDNSError():
            return "its host is not known"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return "its certificate or its TLS is not good"
        case aiohttp.ClientConnectionError():
            return "there is no connection to it"
    return "its answer is broken"


def _socket(policy: AddressPolicy, addr_info: tuple[Any, ...]) -> socket.socket:
    family, kind, proto, _, sockaddr = addr_info
    if not policy.allows(sockaddr[0]):
        raise AddressRefusedError
    return socket.socket(family, kind, proto)


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except OSError:
            continue
        return True
    return False


def _proxy_for(url: URL) -> str | None:
    assert url.host is not None
    if proxy_bypass(url.host):
        return None
    return getproxies().get(url.scheme)


def _joined(url: URL, location: str) -> URL:
    try:
        return url.join(URL(location))
    except ValueError as error:
        raise FetchError("it redirects to what is no URL") from error


def _download_limit(max_bytes: int | None) -> int | None:
    """The smaller one of two bounds of which either may be absent."""
    megabytes = envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
    limits = [megabytes * MiB_bytes] if megabytes > 0 else []
    return min([*limits, *([] if max_bytes is None else [max_bytes])], default=None)


async def _body(reply: aiohttp.ClientResponse, max_bytes: int | None, budget: MediaBudget) -> bytes:
    """The body, decompressed, if it keeps the limit; read no further than that."""
    if reply.status >= HTTPStatus.BAD_REQUEST:
        again = reply.status in (408, 429) or reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise (_TransientError if again else FetchError)(f"its server answered {reply.status}")
    if max_bytes is not None and (reply.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in _decoded(reply, max_bytes):
        budget.take_bytes(len(chunk))
        body += chunk
        if max_bytes is not None and len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


async def _decoded(reply: aiohttp.ClientResponse, max_bytes: int | None) -> AsyncIterator[bytes]:
    """The body's chunks without their Content-Encoding, none larger than the limit and a bit."""
    encoding = reply.headers.get("Content-Encoding", "identity").strip().lower()
    chunks = reply.content.iter_chunked(_CHUNK_BYTES)
    if encoding in ("identity", ""):
        async for chunk in chunks:
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise FetchError(f"its encoding {encoding[:20]!r} is not known")
    decoder = zlib.decompressobj(_ANY_ZLIB_OR_GZIP)
    try:
        async for chunk in chunks:
            yield decoder.decompress(chunk, 0 if max_bytes is None else max_bytes + 1)
            if decoder.unconsumed_tail:
                raise _too_large(max_bytes or 0)
    except zlib.error as error:
        raise FetchError("its compression is broken") from error
    if not decoder.eof:
        raise FetchError("it is cut short")


def _too_large(max_bytes: int) -> FetchError:
    return FetchError(f"it is larger than {max_bytes} bytes")
