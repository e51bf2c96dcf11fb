"""Real ranks of a process group, started in a blink."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world, "jobs_x.name", key=value)`: what the job returned on each rank; failures are shown."""
    script = Path(__file__).with_name("ranks.py")
    command = [sys.executable, "-W", "error", str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout

        def run(world: int, job: str, **values: Any) -> list[Any]:
            file, _, name = job.partition(".")
            line = json.dumps({"world": world, "file": file, "name": name, "with": values})
            server.stdin.write(line + "\n")
            server.stdin.flush()
            answers = json.loads(server.stdout.readline())
            errors = [f"rank {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
            assert not errors, "\n".join(errors)
            return [a["result"] for a in answers]

        yield run
        server.stdin.close()
