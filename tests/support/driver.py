"""A real browser that a test drives, through chromedriver's own protocol (W3C WebDriver: JSON over HTTP)."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_driver = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromedriver, or no chromium that it could drive, on PATH"
)


class Driver:
    """One window."""

    def __init__(self, address: str) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu"]
        chrome = {"binary": BROWSER, "args": flags}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address = address
        self.session = ""
        self.session = f"/session/{self.ask('/session', capabilities={'alwaysMatch': wanted})['sessionId']}"
        self.looks()

    def looks(self, width: int = 1280, height: int = 1000, scheme: str = "light") -> None:
        """Set the size of the screen in pixels, and the colour scheme that the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)
        self.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def ask(self, path: str, method: str = "POST", **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + self.session + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self.ask("/url", url=url)

    def js(self, script: str, *arguments: Any) -> Any:
        """What a script returns, or what it promises."""
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


@contextmanager
def driven() -> Iterator[Driver]:
    """A window, until the block ends."""
    command, pipe = [str(DRIVER), "--port=0"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "started successfully on port" in line)
            window = Driver(f"http://127.0.0.1:{line.split()[-1].rstrip('.')}")
            try:
                yield window
            finally:
                window.ask("", "DELETE")
        finally:
            server.terminate()
