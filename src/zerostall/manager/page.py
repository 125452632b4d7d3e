"""The dashboard: one file with everything in it, allowed to run its own script and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def page() -> tuple[bytes, str]:
    """The page, and what a browser may do with it."""
    text = resources.files("zerostall.manager").joinpath("page.html").read_text(encoding="utf-8")
    scripts = " ".join(_digests("script", text))
    styles = " ".join(_digests("style", text))
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digests(tag: str, text: str) -> Iterator[str]:
    for body in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
        yield f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"


async def serve(request: web.Request) -> web.Response:
    """The empty page; what it shows it asks for with the token that the reader gives it."""
    body, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)
