"""A server of pages for one reader on this machine.

It answers GET alone, from 127.0.0.1 alone. The first part of every address is a secret token; a request
without it learns nothing. Nothing of a request reaches the file system: its path is compared with the names
of existing pages. A request whose Host is another name is refused, because a foreign site could lead its own
name to 127.0.0.1 and read the answers (DNS rebinding).
"""

import hmac
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from narrowgauge.errors import UserError

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_IDLE_S = 60.0  # an unused connection is closed
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # that of the page admits its script alone; the stricter of both holds


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it is sent.

    Attributes:
        tag: Identifies the content; equal for equal content.
        html: The content; read only if the reader has another tag.
        name: The file in which it is saved; "" for a page that is shown.
    """

    tag: str
    html: Callable[[], str]
    name: str = ""


#: From the address below the token, such as "" or "save", to a page; None if there is none.
Pages = Callable[[str], Page | None]


class PageServer(ThreadingHTTPServer):
    """Serves pages until `shutdown`; `url` is the address to open."""

    daemon_threads = True

    def __init__(self, pages: Pages, port: int = 0) -> None:
        """Listen on a port; 0 for any free one.

        Raises:
            UserError: The port cannot be used.
        """
        self.pages, self.token = pages, secrets.token_urlsafe(24)
        self.is_closed = False
        self.asked_at = -math.inf  # the last request for a page, on the clock of `time.monotonic`
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"port {port} of {HOST} cannot be used ({reason}); take another --port, or none for a free "
                "one"
            ) from None

    @property
    def url(self) -> str:
        """The address, with the token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def server_close(self) -> None:
        """Stop listening; a connection that is still open gets no more answers."""
        self.is_closed = True
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a reader that went away."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def version_string(self) -> str:
        return "narrowgauge"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is the run's, and a log would hold the token."""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if self.server.is_closed:
            self.close_connection = True
            return
        parts = self.path.partition("?")[0].split("/", 2)
        token, address = parts[1] if len(parts) > 1 else "", parts[2] if len(parts) > 2 else None
        if host not in _NAMES:
            self._refuse(403, f"this page is at {HOST} alone, and the request names another host")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(403, "the address lacks its token: open the one that `narrowgauge watch` printed")
        elif address is None or (page := self.server.pages(address)) is None:
            self._refuse(404, "page not found: the run was removed, or the address is incomplete")
        elif self.headers.get("If-None-Match") == f'"{page.tag}"':
            self._answer(304, b"", page)
        else:
            self._answer(200, page.html().encode(), page)

    def _answer(self, code: int, body: bytes, page: Page) -> None:
        self.server.asked_at = time.monotonic()
        self._send(code, body, page)

    do_HEAD = do_GET

    def _refuse(self, code: int, sentence: str) -> None:
        self._send(code, f"{sentence}\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request other than GET in one sentence, and close."""
        self.close_connection = True
        sentence = "this server answers GET alone" if code == 501 else "the request is malformed"
        self._refuse(405 if code == 501 else code, sentence)

    def _send(self, code: int, body: bytes, page: Page | None = None) -> None:
        self.send_response(code)
        kind = "text/html" if code == 200 else "text/plain"
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if page is not None:
            headers["ETag"] = f'"{page.tag}"'
            if page.name:
                headers["Content-Disposition"] = f'attachment; filename="{page.name}"'
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            if not (code == 304 and name in ("Content-Type", "Content-Length")):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and code != 304:
            self.wfile.write(body)
