"""Real ranks: reads one JSON job a line, forks a process for each rank, and answers how each ended.

    {"do": "module.function", "with": {...}, "environments": [{...}, ...], "meets": true, "folder": "/x"}

There is a rank for each of the environments, in which it calls the function, or the body of a test there
(`distributed.ranks`), with the arguments. Those that meet do so in a file (no port), over gloo; a trainer
does so by itself. The answer for a rank is its exit code (negative: the signal), and its result, or its
error with a trace.

torch, and the modules that the command line names, are imported once, in this process, so that a job costs
little more than its steps.
"""

import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def be_rank(rank: int, job: dict, meeting: str, out: int) -> None:
    """In a separate process: do the job, write what it returns or raises as JSON."""
    ranks = len(job["environments"])
    os.dup2(2, 1)  # prints go to standard error: standard output carries answers
    try:
        os.environ.update(job["environments"][rank])
        os.chdir(job.get("folder", "."))
        warnings.simplefilter(job.get("warnings", "error"))
        if job["meets"]:
            store, timeout = dist.FileStore(meeting, ranks), timedelta(seconds=60)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        module, _, name = job["do"].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        answer = {"result": getattr(function, "job", function)(**job["with"])}
        if job["meets"]:
            dist.destroy_process_group()
        elif dist.is_initialized():  # trainers leave it so, and the first rank keeps what the others meet in
            dist.barrier()
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    with os.fdopen(out, "w") as pipe:
        json.dump(answer, pipe)
    os._exit("error" in answer)


def do(job: dict) -> list[dict]:
    """How each rank ended."""
    with tempfile.TemporaryDirectory() as directory:
        started, answers = [], []
        for rank in range(len(job["environments"])):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                be_rank(rank, job, f"{directory}/meeting", writing)
            os.close(writing)
            started.append((pid, reading))
        for pid, reading in started:
            with os.fdopen(reading) as pipe:
                answer = json.loads(pipe.read() or '{"error": "died", "trace": "died"}')
            answers.append(answer | {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
        return answers


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # a child does not look through, at its end, what it never touched
    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), flush=True)
    os._exit(0)  # no need to take torch apart
