"""The command `narrowgauge`, also available as `python -m narrowgauge`.

Importing torch takes seconds, or minutes on a cluster's file system. A request to stop that arrives meanwhile
is recorded and honored once the import is done, so that a training process handles signals from its first
moment and never outlives its launcher. Commands that do not need torch run without importing it (`cli.main`).
"""

import os
import sys
from contextlib import nullcontext

from narrowgauge.system.signals import die_with_launcher, stop_requests


def main() -> int:
    """Run the command line and return its exit code (`cli`)."""
    die_with_launcher(os.environ)
    # When one rank fails, torch logs the stack of every lost connection in all the others.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler logs that it starts
    trains = sys.argv[1:2] == ["train"]
    with stop_requests(at_the_end=True) if trains else nullcontext():
        try:
            from narrowgauge.trainer.cli.main import main as run_command
        except KeyboardInterrupt:
            print("narrowgauge: interrupted", file=sys.stderr)
            return 1
        return run_command()


if __name__ == "__main__":
    sys.exit(main())
