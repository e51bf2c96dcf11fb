"""The origin of a run: when, on which host, with which version and command line."""

import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def now() -> str:
    """The time in UTC to the second, such as 2026-11-22T07:30:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str:
    """The command line of this process as one would type it, or that of a script with a custom loop."""
    program, *words = sys.argv or [""]
    name = "narrowgauge" if Path(program).name in ("__main__.py", "-m") else Path(program).name
    return shlex.join([name, *words])


def provenance() -> dict[str, str]:
    """The facts about a run's origin in its start and resume events."""
    try:
        installed = version("narrowgauge")
    except PackageNotFoundError:  # imported from source without being installed
        installed = "from source"
    return {"time": now(), "host": platform.node(), "version": installed, "command": command_line()}
