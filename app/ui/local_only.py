"""Middleware that refuses requests of other machines and of other sites' pages.

Gradio alone answers any `Host` header (DNS rebinding: an attacker's name for 127.0.0.1), and runs what another site's
page posts as plain text, which browsers send without a CORS preflight.
"""

from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ["127.0.0.1", "localhost"]
# Gradio's page needs inline scripts and `eval`; every resource comes from this server.
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
    """The middleware for FastAPI, outermost first."""
    return [Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False), Middleware(SameOrigin)]


class SameOrigin:
    """Refuses requests that a browser sends for another site's page, and adds `HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] == "websocket":  # Gradio uses none, and browsers let pages of any site open one
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
    # A link on another site may open the page itself: that changes nothing.
    is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return not (is_link and headers.get("sec-fetch-dest") == "document" and scope["path"] == "/")
