"""Reads the images of requests: fetches those behind URLs, and bounds all of them, before a replica gets the request.

A replica never fetches an image. Another replica that continues a turn would then read another one, and a replica could
be made to call addresses of its own network. Here a name is resolved once and its address checked, as for tools.
"""

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from cluster.api.image_bounds import MAX_IMAGE_BYTES, MAX_IMAGES, ImageRefused, check_pixels, content_of
from cluster.api.images import DATA, ImagePart, images_of
from cluster.core.errors import BadRequest, ToolError
from cluster.core.supervision import run_all
from tools_runtime.addresses import Resolver

FETCH_WITHIN_S = 15.0
"""Seconds within which all images of a request are fetched."""
FETCHED_AT_ONCE = 8
"""Largest number of images that are fetched at the same time for one tenant. Others of it wait."""
MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class ImageReader:
    """Reads the images of the requests of one ingress.

    Args:
        max_bytes: largest size of all images of a request in bytes.
        resolver: makes what looks up the names of a tenant.
    """

    def __init__(self, max_bytes: int, resolver: Callable[[], Resolver] = Resolver) -> None:
        self._max_bytes = max_bytes
        self._resolver = resolver
        self._client: httpx.AsyncClient | None = None
        self._tenants: dict[str, _Tenant] = {}
        """The tenants that had an image fetched. They are kept, since a look-up can outlive its request."""

    async def read(self, body: Mapping[str, Any], tenant: str) -> None:
        """Fetch the images of a body, and put them into it as `data:` URLs.

        Args:
            body: the body.
            tenant: whose request it is. A tenant whose servers or name servers are slow delays no other.

        Raises:
            BadRequest: an image cannot be fetched, is no image or too large, or there are too many. ``param`` is its
                place in the body.
        """
        found = list(images_of(body))
        if not found:
            return
        if len(found) > MAX_IMAGES:
            raise _bad(found[MAX_IMAGES], f"the request has {len(found)} images, and at most {MAX_IMAGES} are read")
        if remote := [one for one in found if _is_http(one.url)]:
            await self._fetch_all(remote, tenant)
        await asyncio.to_thread(self._check, found)

    async def aclose(self) -> None:
        """Close the resolvers and the connections to servers of images. No fetch may be in progress."""
        for tenant in self._tenants.values():
            tenant.resolver.close()
        if self._client is not None:
            await self._client.aclose()

    async def _fetch_all(self, images: list[ImagePart], name: str) -> None:
        if (tenant := self._tenants.get(name)) is None:
            tenant = self._tenants[name] = _Tenant(self._resolver())
        room = _Room(self._max_bytes)
        try:
            async with asyncio.timeout(FETCH_WITHIN_S):
                await run_all(self._fetch(one, tenant, room) for one in images)
        except TimeoutError:
            raise _bad(images[0], f"the images were not fetched within {FETCH_WITHIN_S:g} s") from None

    async def _fetch(self, image: ImagePart, tenant: "_Tenant", room: "_Room") -> None:
        if self._client is None:
            # A connection to a checked address is not kept: another name at that address would be sent through it.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)
        async with tenant.turns:
            await self._fetch_now(self._client, tenant.resolver, image, room)

    async def _fetch_now(self, client: httpx.AsyncClient, resolver: Resolver, image: ImagePart, room: "_Room") -> None:
        with _refused(image):
            url = httpx.URL(image.url)
            for _ in range(MAX_REDIRECTS + 1):
                request = httpx.Request("GET", url, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                response = await client.send(await resolver.pinned(request), stream=True)
                try:
                    if response.status_code not in _REDIRECTS or "location" not in response.headers:
                        image.set_url(await _data_url(image, response, room))
                        return
                    url = url.join(response.headers["location"])
                finally:
                    await response.aclose()
                if url.scheme not in ("http", "https"):
                    raise _bad(image, "a redirect leads to another scheme")
        raise _bad(image, f"more than {MAX_REDIRECTS} redirects")

    def _check(self, images: list[ImagePart]) -> None:
        whole = 0
        for image in images:
            if not isinstance(image.url, str):
                continue  # the replica names what the field must be
            content = _content(image)
            whole += len(content)
            if len(content) > MAX_IMAGE_BYTES or whole > self._max_bytes:
                raise _too_large(image, self._max_bytes)
            _check_pixels(image, content)


class _Tenant:
    """What the fetches of one tenant share."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self.turns = asyncio.Semaphore(FETCHED_AT_ONCE)


class _Room:
    """The bytes that the images of one request may still have."""

    def __init__(self, left_bytes: int) -> None:
        self._most_bytes = self._left_bytes = left_bytes

    def take(self, image: ImagePart, taken_bytes: int) -> None:
        self._left_bytes -= taken_bytes
        if self._left_bytes < 0:
            raise _too_large(image, self._most_bytes)


def _is_http(url: Any) -> bool:
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


async def _data_url(image: ImagePart, response: httpx.Response, room: _Room) -> str:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code != 200 or not kind.startswith("image/"):
        raise _bad(image, f"its server answers with status {response.status_code} and type {kind[:64]!r}, not an image")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _bad(image, "its server compresses it, although that was not asked for")
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        room.take(image, len(chunk))
        if len(content) > MAX_IMAGE_BYTES:
            raise _bad(image, f"the image has more than {MAX_IMAGE_BYTES} bytes", 413)
    return f"{DATA}{kind};base64,{base64.b64encode(content).decode()}"


def _content(image: ImagePart) -> bytes:
    try:
        return content_of(image.url)
    except ImageRefused as error:
        raise _bad(image, str(error)) from None


def _check_pixels(image: ImagePart, content: bytes) -> None:
    try:
        check_pixels(content)
    except ImageRefused as error:
        raise _bad(image, str(error), 413 if error.too_large else 400) from error


@contextmanager
def _refused(image: ImagePart) -> Iterator[None]:
    try:
        yield
    except ToolError as error:
        raise _bad(image, str(error).replace("tools may not reach it", "it may not be reached")) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise _bad(image, f"it cannot be fetched: {type(error).__name__}") from None


def _too_large(image: ImagePart, whole_bytes: int) -> BadRequest:
    most = min(MAX_IMAGE_BYTES, whole_bytes)
    return _bad(image, f"an image has at most {most} bytes, and all together {whole_bytes}", 413)


def _bad(image: ImagePart, message: str, status: int = 400) -> BadRequest:
    return BadRequest(f"{image.path}: {message}", status=status, param=image.path, code="invalid_image")
