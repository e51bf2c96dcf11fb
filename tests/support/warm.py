"""`python -m narrowgauge`, with torch imported already: forks for each job, so that a start costs little.

Reads one JSON job a line: {"arguments": ...} starts a process and answers its pid; {"wait": pid, "seconds":
s} answers its exit code (negative: the signal), or null where it runs still. A child is the command, or a
`script`, as a user starts it: its own arguments, directory, standard streams, signals and exit code. With
`forks`, so are the processes that it starts in turn (`support.forked`).

Left out is what Python does at the end of a process for what is imported here: it takes every module apart,
and torch every operator that it registered. That copies the pages which the child shares with this process,
and takes ten times what a refused command takes.
"""

import gc
import json
import os
import resource
import signal
import sys
import time
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked import Program, forks_instead  # first: torch takes Popen by its name

# isort: split
import torch._dynamo
import torch.distributed.elastic.multiprocessing.api
import torch.distributed.launcher.api  # noqa: F401  and when torchrun starts

import narrowgauge.trainer.bench.bench
import narrowgauge.trainer.cluster.scaling.scaling
import narrowgauge.trainer.laboratory.advise.search
import narrowgauge.trainer.laboratory.compare
import narrowgauge.trainer.laboratory.plan
import narrowgauge.trainer.laboratory.train
import narrowgauge.trainer.laboratory.watch
import narrowgauge.trainer.runs.use.export
import narrowgauge.trainer.runs.use.served  # noqa: F401  what verbs import when they run
from narrowgauge.trainer.cli.line import VERBS, parser_of


def become(job: dict) -> None:
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY), number)
    os.dup2(os.open(job["reads"], os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    if job["reader_gone"]:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    if job["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (job["memory"], resource.RLIM_INFINITY))
    if job["largest_file"]:
        # a write beyond the limit then fails, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], resource.RLIM_INFINITY))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where tests run under nohup
    forks_instead(job["forks"])
    Program(job["script"] or None, job["arguments"]).run()


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a child; None where it still runs after n seconds."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def main() -> None:
    for verb in VERBS:
        parser_of(verb)
    gc.freeze()  # a child does not look through, at its end, what it never touched
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            answer = wait(job["wait"], job["seconds"])
        else:
            for name in ("out", "err"):  # here, since a child may be killed before it does anything
                Path(job[name]).touch()
            answer = os.fork()
            if answer == 0:
                become(job)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
