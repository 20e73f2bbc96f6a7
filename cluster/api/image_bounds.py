"""The bounds of an image that is sent as a `data:` URL, and the check of one. Pure functions."""

import base64
import binascii
import re
from io import BytesIO

from PIL import Image, UnidentifiedImageError

MAX_IMAGES = 32
"""Largest number of images of a request, and of tools' answers in a program that the cluster runs."""
MAX_IMAGE_BYTES = 8 << 20
"""Largest size of an image in bytes, as it is sent or fetched."""
MAX_PIXELS = 36_000_000
"""Largest number of pixels of an image. A small file can have many, which take three bytes each."""

_DATA_URL = re.compile(r"^data:image/[\w.+-]+;base64,", re.IGNORECASE)


class ImageRefused(Exception):
    """An image that cannot be used.

    Args:
        message: the reason.
        too_large: whether only its size is wrong.
    """

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


def content_of(url: str) -> bytes:
    """Return the content of an image in a `data:` URL.

    Raises:
        ImageRefused: it is no such URL, or its content is not base64.
    """
    if not _DATA_URL.match(url):
        raise ImageRefused("must be an http(s) URL or `data:image/TYPE;base64,...`")
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageRefused(f"its data is not base64: {error}") from None


def check_pixels(content: bytes) -> None:
    """Check that a file is an image, of no more than `MAX_PIXELS`.

    Raises:
        ImageRefused: it is not.
    """
    try:
        with Image.open(BytesIO(content)) as opened:  # it reads the head only
            width, height = opened.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ImageRefused("it is no image of a known format") from error
    except Image.DecompressionBombError as error:
        raise ImageRefused(f"the image has more than {MAX_PIXELS} pixels", too_large=True) from error
    if width * height > MAX_PIXELS:
        raise ImageRefused(f"the image has {width * height} pixels; at most {MAX_PIXELS} are read", too_large=True)
