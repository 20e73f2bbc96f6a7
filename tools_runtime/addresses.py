"""Decides which addresses a tool may reach.

A name is resolved and checked, and the connection uses the checked address.

A name that changes between the check and the connection (DNS rebinding) therefore has no effect. All spellings of an
address (decimal, octal, IPv4 inside IPv6) are judged by what they resolve to.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from cluster.core.errors import ToolFailed, ToolRefused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

RESOLVERS = 4
"""Number of names that one tool, or one tenant for its images, can look up at a time."""

_EMBEDDING = ipaddress.ip_network("64:ff9b::/96")
"""The NAT64 network. The last 32 bits of its addresses are an IPv4 address (RFC 6052)."""

_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata service is in it
            "192.0.0.0/24",
            "198.18.0.0/15",
            "64:ff9b:1::/48",
            "fec0::/10",
            "2001::/23",
            "5f00::/16",
        ),
    )
)
"""Networks that are not public, for which Python's `is_global` differs between releases."""


def is_public(address: Address) -> bool:
    """Return whether an address is on the internet.

    Private, loopback, link-local, multicast, metadata and reserved addresses are not.
    """
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        if embedded is not None:
            return is_public(embedded)
    if any(address in network for network in _NOT_PUBLIC if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _EMBEDDING or (int(address) >> 32 == 0 and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


class Resolver:
    """Looks up names on threads of its own, so that a name server that hangs delays their owner only.

    Args:
        networks: networks in CIDR form, whose addresses are allowed like public ones.
    """

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks = tuple(map(ipaddress.ip_network, networks))
        self._threads = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolve")

    async def public_address(self, host: str, port: int) -> str:
        """Return an address of ``host``. All its addresses have to be public, or in the allowed networks.

        Raises:
            ToolRefused: an address is not allowed.
            ToolFailed: there is no address.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host, port)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ToolFailed(f"{host[:100]!r} cannot be resolved: {reason}", transient=True) from None
        for address in found:
            if not (is_public(address) or any(address in network for network in self._networks)):
                raise ToolRefused(f"{host[:100]!r} is not a public address; tools may not reach it")
        if not found:
            raise ToolFailed(f"{host[:100]!r} has no address", transient=True)
        return str(found[0])

    async def pinned(self, request: httpx.Request) -> httpx.Request:
        """Return the same request to the checked address. Host header and TLS keep the name.

        Raises:
            ToolRefused: an address is not allowed.
            ToolFailed: there is no address.
        """
        host = request.url.host
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        address = await self.public_address(host, port)
        return httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            content=request.content,
            extensions={"sni_hostname": request.url.raw_host.decode("ascii")},
        )

    def close(self) -> None:
        """End the threads. No name can be looked up any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[Address]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A zone (fe80::1%eth0) says which link; only link-local addresses have one.
    return [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
