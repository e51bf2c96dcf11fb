"""Real ranks: reads one JSON job a line, forks a process for each rank, and answers with what they returned.

torch is imported once, in this process, so that a job costs little more than its collectives. The ranks meet
in a file (no port), over gloo. A job is a function of one of the files next to this one, or the body of a
test there (`on_ranks`).
"""

import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist


def on_ranks(world: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets each of n ranks run a test's body; without a number the test's argument `world` is it.

    Arguments travel as JSON. An assertion that fails on a rank fails the test.
    """

    def decorate(job: Callable[..., None]) -> Callable[..., None]:
        def test(ranks: Callable[..., list[Any]], **values: Any) -> None:
            ranks(
                world or values.pop("world"),
                f"{Path(job.__code__.co_filename).stem}.{job.__name__}",
                **values,
            )

        names = ["ranks", *["world"] * (not world), *inspect.signature(job).parameters]
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        test.__name__, test.__doc__, test.__module__ = job.__name__, job.__doc__, job.__module__
        test.job = job
        return test

    return decorate


def be_rank(rank: int, job: dict, meeting: str, out: int) -> None:
    """In a separate process: do the job, write what it returns as JSON."""
    try:
        store = dist.FileStore(meeting, job["world"])
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job["world"], timeout=timedelta(seconds=60)
        )
        function = getattr(importlib.import_module(job["file"]), job["name"])
        answer = {"result": getattr(function, "job", function)(**job["with"])}
        dist.destroy_process_group()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(out, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def do(job: dict) -> list[dict]:
    """What each rank answers."""
    with tempfile.TemporaryDirectory() as directory:
        pipes = []
        for rank in range(job["world"]):
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.close(reading)
                be_rank(rank, job, f"{directory}/meeting", writing)
            os.close(writing)
            pipes.append(reading)
        answers = []
        for reading in pipes:
            with os.fdopen(reading) as pipe:
                answers.append(json.loads(pipe.read() or '{"error": "died"}'))
            os.wait()
        return answers


if __name__ == "__main__":
    warnings.simplefilter("error")
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent)]
    for name in ("jobs_training", "test_ddp", "test_fsdp", "test_quantized_gather", "test_quantized_reduce"):
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), flush=True)
