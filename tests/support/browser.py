"""A page in a real browser.

To press buttons without a driver, a copy of the page without its policy gets one more script, which acts and
leaves what it saw in the title.
"""

import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)


def dump(page, profile, *flags):
    """The document after its scripts ran, and what the browser complained of."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    command += [
        f"--user-data-dir={profile}",
        "--virtual-time-budget=2000",
        *flags,
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def said_by(dom):
    """What the script left in the title."""
    return json.loads(re.search(r"<title>(\{.*?\})</title>", dom)[1].replace("&amp;", "&"))


def without_policy(html):
    """The page as one that scripts may be added to."""
    return re.sub(r"<meta http-equiv[^>]*>", "", html)
