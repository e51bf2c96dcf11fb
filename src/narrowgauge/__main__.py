"""The command `narrowgauge`, which is `python -m narrowgauge` too.

Importing torch takes seconds, on a cluster's file system minutes. What asks a run to stop in that time is
noted, and heeded when the import is done: a process that starts to train has an answer to signals from its
first moment on, and never outlives its launcher. What takes no torch is answered without it (`cli.main`).
"""

import os
import sys
from contextlib import nullcontext

from narrowgauge.signals import die_with_launcher, stop_requests


def main() -> int:
    """Run the command line; returns the exit code (`cli`)."""
    die_with_launcher(os.environ)
    # When one rank fails, torch in each of the others logs the stack of every connection it has lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells that it begins
    trains = sys.argv[1:2] == ["train"]
    with stop_requests(at_the_end=True) if trains else nullcontext():
        try:
            from narrowgauge.cli.main import main as run_command
        except KeyboardInterrupt:
            print("narrowgauge: interrupted", file=sys.stderr)
            return 1
        return run_command()


if __name__ == "__main__":
    sys.exit(main())
