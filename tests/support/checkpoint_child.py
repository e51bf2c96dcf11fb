"""Real processes to kill: reads one JSON job a line, forks for each, and answers with how the child ended.

torch is imported once, in this process, so that a job costs milliseconds. A child's tensors and state are
filled with the number of its step: a checkpoint's content shows which save wrote it.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from narrowgauge.checkpoint import lock_run, save
from narrowgauge.files import write_whole
from narrowgauge.json_lines import append_lines


def save_step(job: dict, step: int) -> None:
    tensors = {
        "model": {"w": torch.full((job.get("elements", 1000),), float(step)), "n": torch.tensor(step)},
        "optimizer": {"m": torch.full((100,), float(step)).to(torch.bfloat16)},
    }
    save(Path(job["path"]), step, tensors, {"step": step}, keep=job.get("keep", 2), run_id="run")


def do(job: dict) -> None:
    path = Path(job["path"])
    if job["do"] == "save":
        if "largest_file" in job:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], resource.RLIM_INFINITY))
        save_step(job, job["step"])
    elif job["do"] == "save for ever":
        step = job["step"]
        while True:
            step += 1
            save_step(job, step)
    elif job["do"] == "append for ever":
        while True:
            append_lines(path, [{"loss": 1.5, "padding": "x" * 20_000}])
    elif job["do"] == "write whole":
        write_whole(path, job["text"])
    elif job["do"] == "lock":
        with lock_run(path):
            Path(job["ready"]).touch()
            time.sleep(60)


def run_in_child(job: dict) -> None:
    os.environ.update(job.get("environment", {}))
    try:
        do(job)
        code = 0
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        Path(job["said"]).write_text(f"{type(error).__name__}: {error}")
        code = 1
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_in_child(job)
        if "kill_after_s" in job:
            time.sleep(job["kill_after_s"])
            os.kill(pid, signal.SIGKILL)
        code = None
        if job.get("wait", True):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"pid": pid, "code": code}), flush=True)


if __name__ == "__main__":
    main()
