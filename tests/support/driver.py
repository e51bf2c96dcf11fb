"""A real browser that a test drives, through chromedriver's own protocol (W3C WebDriver: JSON over HTTP)."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.browser import BROWSER

DRIVER = shutil.which("chromedriver")
needs_driver = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromedriver, or no chromium that it could drive, on PATH"
)


class Driver:
    """One window."""

    def __init__(self, address: str, dark: bool = False, width: int = 1280, height: int = 1000) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"]
        flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
        chrome = {"binary": BROWSER, "args": flags}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address = address
        self.session = ""
        self.session = f"/session/{self.ask('/session', capabilities={'alwaysMatch': wanted})['sessionId']}"

    def ask(self, path: str, method: str = "POST", **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + self.session + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self.ask("/url", url=url)

    def js(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.ask("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        """The text of the first element."""
        return self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def until(self, is_true: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < deadline, self.text("main")[:2000]
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        """What the console has printed since the last call."""
        return [entry["message"] for entry in self.ask("/se/log", type="browser")]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("/screenshot", "GET")))


@contextmanager
def driven(**how: Any) -> Iterator[Driver]:
    """A window, until the block ends."""
    command, pipe = [str(DRIVER), "--port=0"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "started successfully on port" in line)
            window = Driver(f"http://127.0.0.1:{line.split()[-1].rstrip('.')}", **how)
            try:
                yield window
            finally:
                window.ask("", "DELETE")
        finally:
            server.terminate()
