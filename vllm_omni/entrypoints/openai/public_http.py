# SPDX-License-Identifier: Apache-2.0
"""HTTP fetches that reach public addresses only.

The address is checked when the socket is made, after name resolution, so neither a name that
resolves to a private address nor a redirect to one gets through.
"""

import ipaddress
import socket
from typing import Any
from urllib.request import getproxies

import aiohttp
import requests
from vllm.connections import HTTPConnection


class PrivateAddressError(OSError):
    """The URL leads to an address that is not public."""


def is_public(host: str) -> bool:
    """Whether an IP address can be reached from anywhere."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_global and not address.is_multicast


def _public_socket(addr_info: tuple[Any, ...]) -> socket.socket:
    family, kind, proto, _, sockaddr = addr_info
    if not is_public(sockaddr[0]):
        raise PrivateAddressError("the address is not a public one")
    return socket.socket(family, kind, proto)


class PublicHTTPConnection(HTTPConnection):
    """vLLM's HTTP client without access to private addresses.

    With a proxy in the environment it is the proxy that connects, and that decides.
    """

    async def get_async_client(self) -> aiohttp.ClientSession:
        """See `HTTPConnection`."""
        if getproxies():
            return await super().get_async_client()
        if self._async_client is None or not self.reuse_client:
            connector = aiohttp.TCPConnector(socket_factory=_public_socket)
            self._async_client = aiohttp.ClientSession(connector=connector)
        return self._async_client

    def get_sync_client(self) -> requests.Session:
        """Not used by the server, which is asynchronous throughout."""
        raise NotImplementedError


public_http_connection = PublicHTTPConnection()
