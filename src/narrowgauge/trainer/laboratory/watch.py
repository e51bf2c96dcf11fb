"""Follows runs and comparisons on a page that is written again while they train.

The page, `live.html`, is a file, so it needs no server: the browser loads it again every few seconds. It is
made of the run directories alone, and nothing is asked of the processes that train: it shows a run of another
user, of another machine on a shared file system, or one that was killed last year.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from subprocess import DEVNULL, PIPE, Popen

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory
from narrowgauge.system.signals import without_launcher
from narrowgauge.trainer.experiment.findings import page_of
from narrowgauge.trainer.report.page.html import page as html_page
from narrowgauge.trainer.report.page.page import write_page
from narrowgauge.trainer.report.page.standing import runs_of, standing, subjects
from narrowgauge.trainer.report.read.run import ENDED

LIVE, REPORT = "live.html", "report.html"
_EVERY_S = 4.0
_REST = 9.0  # and at least this many times as long as the pages took, so a tenth of a core
_EXIT_S = 5.0  # for a killed process, whose files the system closes first, to disappear


def follow(paths: Sequence[Path], page: Path, wait: Callable[[float], object] = time.sleep) -> None:
    """Write the page of some paths again and again, until all their runs have ended or `wait`, which takes
    seconds, returns true. The page that it leaves, also at Ctrl-C, does not load itself again.
    """
    begun = time.monotonic()
    try:
        while write_pages(paths, page, is_live=True):
            if wait(max(_EVERY_S, _REST * (time.monotonic() - begun))):
                break
            begun = time.monotonic()
    finally:
        write_pages(paths, page)


def write_pages(paths: Sequence[Path], page: Path, is_live: bool = False) -> bool:
    """Write the page of some paths; of a folder a list of its runs, and the page of each that is at work.

    Returns:
        Whether it may change: something is to come, or has not ended.
    """
    found, is_one = subjects(paths)
    states = [runs_of(one) for one in found]
    open_ones = [any(run.status not in ENDED for run in runs) for runs in states]
    if is_one and found:
        write_page(page_of(found[0], states[0], is_live and open_ones[0]), page)
        return open_ones[0]
    for one, runs in zip(found, states, strict=True):
        own, is_open = one.folder / LIVE, any(run.is_at_work for run in runs)
        if is_open or (own.exists() and 'id="live"' in own.read_text()):
            with suppress(UserError):  # a directory of another user has no page of its own
                write_page(page_of(one, runs, is_live and is_open), own)
    if found:
        links = {one.name: _link(one.folder, page.parent) for one in found}
        section = standing({one.name: runs for one, runs in zip(found, states, strict=True)}, links=links)
        write_page(html_page(title=paths[0].resolve().name, content=section, reloads=is_live), page)
    return True


@contextmanager
def watched_by_another(path: Path, say: Callable[[str], object]) -> Iterator[None]:
    """A live page of a run or a comparison, written by another process as long as this one trains.

    The other process reads a pipe that only this one can write. When this process ends, even by SIGKILL, the
    pipe ends, and the other writes the page a last time. The directory may not exist yet.
    """
    with suppress(OSError):  # the run reports why it cannot be made
        make_directory(path.parent)
    command = [sys.executable, "-m", __name__, str(path)]
    environment = without_launcher(os.environ)
    with Popen(  # in a separate session, since Ctrl-C is for the run
        command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=environment, start_new_session=True
    ):
        say(f"live page: {(path / LIVE).resolve().as_uri()}")
        yield


def _follow_beside(path: Path) -> None:
    """Follow the run or comparison of the process that holds the other end of the standard input."""
    follow([path], path / LIVE, lambda seconds: select([0], [], [], seconds)[0])  # nothing is ever written
    deadline = time.monotonic() + _EXIT_S
    while write_pages([path], path / LIVE) and time.monotonic() < deadline:
        time.sleep(0.5)


def _link(folder: Path, here: Path) -> str:
    """The address of the page in a folder, relative to another; "" without one."""
    page = next((page for name in (LIVE, REPORT) if (page := folder / name).exists()), None)
    return "" if page is None else Path(os.path.relpath(page, here)).as_posix()


if __name__ == "__main__":
    _follow_beside(Path(sys.argv[1]))
