"""What keeps other machines and other sites' pages away from the server of the page.

Gradio by itself answers a foreign `Host` (a name that an attacker points at 127.0.0.1) and runs what a foreign page
posts as plain text, which no browser asks leave for.
"""

from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ["127.0.0.1", "localhost"]
# Gradio's page has inline scripts and makes functions from text; all of it comes from this server.
POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "media-src 'self' blob:",
        "worker-src 'self' blob:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def middleware() -> list[Middleware]:
    """For FastAPI, the outermost first."""
    return [Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False), Middleware(SameOrigin)]


class SameOrigin:
    """Refuses what a browser sends for another site's page, and tells it to let no other site show this one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":  # Gradio uses none, and browsers let any page open one
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _is_foreign(scope):
            refusal = PlainTextResponse("This page belongs to another site.", status_code=403)
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _is_foreign(scope: dict[str, Any]) -> bool:
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{headers.get('host')}":
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    # A link elsewhere may lead here, to the page as a whole; nothing is done by that.
    is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return not (is_link and headers.get("sec-fetch-dest") == "document" and scope["path"] == "/")
