"""How the command ends: the message of each error, and the exit code.

Exit codes: 0 done, 2 wrong usage or input, 75 preempted after a save, 1 any other failure. A user's mistake
is one sentence on standard error, without a traceback.
"""

import os
import sys
from collections.abc import Callable

from narrowgauge.system.errors import Failed, ProcessFailed, UserError
from narrowgauge.system.signals import Preempted, StoppedEarly
from narrowgauge.trainer.distributed import reports_for_all

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED = 0, 1, 2, 75


def to_the_end(action: Callable[[], int | None]) -> int:
    """Do the work of a command line; returns the exit code."""
    try:
        code = action() or EXIT_DONE
        print(end="", flush=True)  # there may be no standard output
    except (Preempted, StoppedEarly) as stop:
        return end_for_all(stop, f"stopped by {stop}", EXIT_PREEMPTED)
    except ProcessFailed as error:
        return error.code if error.code > 0 else end_for_all(error, str(error), EXIT_FAILED)
    except Failed as failure:
        return end(with_notes(failure), failure.code) if failure.is_printed else failure.code
    except UserError as error:
        return end_for_all(error, str(error), error.exit_code)
    except KeyboardInterrupt:
        return end("interrupted", EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output went away, as in `narrowgauge recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return EXIT_FAILED
    except OSError as error:  # a full disk, a file system that went away
        return end(with_notes(error), EXIT_FAILED)
    return code


def end(sentence: str, code: int) -> int:
    """Print a sentence on standard error; returns the exit code."""
    print(f"narrowgauge: {sentence}", file=sys.stderr)
    return code


def end_for_all(error: BaseException, sentence: str, code: int) -> int:
    """End every process with the same code; one of them prints, or the rank that a note names."""
    return end(sentence, code) if _notes(error) or reports_for_all(os.environ) else code


def with_notes(error: BaseException) -> str:
    """An error's sentence with its notes: the rank, the loader's thread."""
    return "; ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
