# SPDX-License-Identifier: Apache-2.0
"""The page's files, sent as they lie in the package, and the rules that browsers keep there."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

PATH = "/playground"
OFFER_PATH = f"{PATH}/offer"
INDEX = "index.html"
MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' blob:",
            "media-src blob:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
}
"""Scripts, styles and requests of this server alone; nothing inline; nobody may frame the page."""

_NO_KEY, _KEY_NEEDED = b'data-key="none"', b'data-key="needed"'


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    data: bytes
    media_type: str


def read_assets(keyed: bool) -> dict[str, Asset]:
    """The page's files by name.

    Args:
        keyed: The server asks for API keys; the page is told, so that it asks for one at once
            instead of being refused first.
    """
    assets = {
        each.name: Asset(each.read_bytes(), MEDIA_TYPES[PurePath(each.name).suffix])
        for each in files(__package__).joinpath("static").iterdir()
    }
    if keyed:
        page = assets[INDEX]
        assets[INDEX] = Asset(page.data.replace(_NO_KEY, _KEY_NEEDED), page.media_type)
    return assets


def open_paths() -> tuple[str, ...]:
    """Paths that need no API key: a browser sends none for a page, and the page asks for it."""
    names = (each.name for each in files(__package__).joinpath("static").iterdir())
    return (PATH, f"{PATH}/", *(f"{PATH}/{name}" for name in names if name != INDEX))
