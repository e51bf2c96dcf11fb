"""Small groups of real processes, each rank a separate one."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fault_jobs import free_port
from support.processes import Narrowgauge

MEMBER = Path(__file__).with_name("coordinator_member.py")


class Run:
    """What the ranks of a small run left in its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)

    @staticmethod
    def until(arrived: Callable[[], object], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not arrived():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.01)

    def is_under_way(self, ranks: int = 2) -> bool:
        return all((self.path / f"step-of-{rank}").exists() for rank in range(ranks))

    def text(self, name: str) -> str:
        return (self.path / name).read_text()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def rank(narrowgauge, run, port):
    """Start one rank as srun does, without torchrun: rank 0 keeps the store."""

    def start(number: int, *words: str, size: int = 2, **environment: str):
        place = {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": size}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        place = {name: str(value) for name, value in place.items()} | environment
        return narrowgauge.start(run.path, *words, script=MEMBER, **place)

    return start


@pytest.fixture(scope="session")
def ranks(narrowgauge: Narrowgauge) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world, "jobs_x.name", key=value)`: what the job returned on each rank; failures are shown."""
    with narrowgauge.serve(Path(__file__).with_name("ranks.py")) as ask:

        def run(world: int, job: str, **values: Any) -> list[Any]:
            file, _, name = job.partition(".")
            answers = ask({"world": world, "file": file, "name": name, "with": values})
            errors = [f"rank {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
            assert not errors, "\n".join(errors)
            return [a["result"] for a in answers]

        yield run
