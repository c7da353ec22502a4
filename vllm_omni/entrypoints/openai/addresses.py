# SPDX-License-Identifier: Apache-2.0
"""Which network addresses a client may make the server talk to."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_V4_COMPATIBLE = ipaddress.IPv6Network("::/96")
# Public by the book, but special: protocol assignments (with Oracle's metadata service), relays of
# 6to4, and the agent on Azure's hosts, which has an address of the internet.
_SPECIAL = tuple(
    ipaddress.IPv4Network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")
)

NAMED_HOST_NETWORKS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8"),
        *("fc00::/7", "::1/128"),
    )
)
"""What a host that `--allowed-media-domains` names may be in. Link-local, where cloud metadata
services are, is not among them."""

_NAMED_BUT_METADATA = frozenset(
    {ipaddress.ip_address("100.100.100.200"), ipaddress.ip_address("fd00:ec2::254")}
)


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Public addresses, and networks that the operator opened.

    Attributes:
        networks: Opened with `--allowed-media-networks`; anything in them may be reached.
        named_hosts: Hosts are named by the operator, so private ones may be reached too.
    """

    networks: Sequence[Network] = ()
    named_hosts: bool = False

    def allows(self, host: str) -> bool:
        """Whether an address (with or without an IPv6 zone) may be reached.

        Raises:
            ValueError: `host` is no IP address.
        """
        address = innermost(ipaddress.ip_address(host.partition("%")[0]))
        if any(address in network for network in self.networks):
            return True
        if self.named_hosts and address not in _NAMED_BUT_METADATA:
            return is_public(address) or any(address in each for each in NAMED_HOST_NETWORKS)
        return is_public(address)


def innermost(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, if it does: mapped, 6to4, NAT64, ..."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64 or (address in _V4_COMPATIBLE and int(address) > 1):
        return low
    return address


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, and no infrastructure."""
    if address.is_multicast or not address.is_global:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL)
    return address in _GLOBAL_UNICAST
