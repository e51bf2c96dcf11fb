"""One process of an integration's test, under torchrun: `rank.py OUT JOB ARGUMENTS` writes its result.

A job is a function of one of the files `jobs_*.py` next to this one, named "FILE.FUNCTION"; its arguments are
a JSON object. The process of each rank writes OUT/RANK.json.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    out, job, arguments = sys.argv[1:]
    file, _, name = job.partition(".")
    result = getattr(importlib.import_module(f"integrations.{file}"), name)(**json.loads(arguments))
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():  # trainers leave it so, and its threads must not outlive Python
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # `destroy_process_group` aborted once: gloo's threads ended after it
