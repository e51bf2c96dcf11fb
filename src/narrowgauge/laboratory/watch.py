"""Follows runs and comparisons on a live page, from their directories alone.

Nothing is asked of the processes that train: a page shows a run of another user, of another machine on a
shared file system, or one that was killed last year.
"""

import json
import os
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from narrowgauge.errors import UserError
from narrowgauge.experiment.power import power_text
from narrowgauge.files import make_directory, write_whole
from narrowgauge.report.live.pages import Watched, rows_of
from narrowgauge.report.live.server import PageServer
from narrowgauge.report.live.subject import REPORT, Subject, subjects
from narrowgauge.report.page.rungs import rungs_section
from narrowgauge.report.read.run import METRICS, PROBE, Run, read_state
from narrowgauge.report.verdict.rungs import ArmResult, Row, arm_results
from narrowgauge.report.verdict.verdict import paired_gaps
from narrowgauge.signals import without_launcher

_READER_S = 5.0  # a page asks every two seconds
_EXIT_S = 5.0  # for a killed process, whose files the system closes first, to disappear


def watched(paths: Sequence[Path]) -> Watched:
    """The pages of some paths.

    Raises:
        UserError: A path is a file, or stands in a folder that does not exist.
    """
    for path in paths:
        if path.is_file():
            raise UserError(
                f"{path} is a file; name a run directory, a folder of compare, or a folder of runs"
            )
        if not path.exists() and not path.resolve().parent.is_dir():
            raise UserError(f"{path.parent} does not exist; name a run directory, or where one will be")
    return Watched(paths, _extra)


def write_page(paths: Sequence[Path], out: Path) -> None:
    """Write the page as it is now.

    Raises:
        UserError: A path is wrong, or the file cannot be written.
    """
    html = watched(paths).archive()
    try:
        make_directory(out.parent)
        write_whole(out, html)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another file") from error


@contextmanager
def serving(paths: Sequence[Path], port: int = 0) -> Iterator[PageServer]:
    """A server of the pages in the background, until the block ends.

    Raises:
        UserError: A path is wrong, or the port cannot be used.
    """
    server = PageServer(watched(paths), port)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def opened_browser(url: str, open_file: Callable[[str], object] = webbrowser.open) -> Iterator[None]:
    """Show an address in the browser of the desktop, if there is one.

    The browser gets a file that leads to the address, since other users see the arguments of a process.
    """
    has_desktop = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_desktop:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:  # for its owner alone
        file = Path(folder) / "watch.html"
        file.write_text(f'<meta http-equiv="refresh" content="0; url={escape(url)}">', encoding="ascii")
        open_file(file.as_uri())
        yield


@contextmanager
def watched_by_another(path: Path, say: Callable[[str], object]) -> Iterator[None]:
    """A live page of a run or a comparison, served by another process as long as this one trains.

    The other process reads a pipe that only this one can write. When this process ends, even by SIGKILL, the
    pipe ends, and the other writes the page into the directory if this one did not.

    Args:
        path: The directory, which may not exist yet.
        say: Called with the address.
    """
    with suppress(OSError):  # the run reports why it cannot be made
        make_directory(path.parent)
    command = [sys.executable, "-m", "narrowgauge", "watch", str(path), "--beside"]
    environment = without_launcher(os.environ)
    with Popen(  # in a separate session, since Ctrl-C is for the run
        command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, start_new_session=True
    ) as other:
        assert other.stdout is not None
        address = other.stdout.readline().decode().strip()
        say(f"live page: {address}" if address else f"no live page; narrowgauge watch {path} prints why")
        yield


def keep_page(path: Path) -> None:
    """Write the page of a run or a comparison into its directory, unless one there shows all records."""
    page = path / REPORT
    runs = [run for one in subjects([path])[0] for run in one.paths if (run / METRICS).is_file()]
    deadline = time.monotonic() + _EXIT_S
    while any(read_state(run)[0] == "running" for run in runs) and time.monotonic() < deadline:
        time.sleep(0.02)
    with suppress(OSError, UserError):  # the disk is full
        recorded = [(run / METRICS).stat().st_mtime_ns for run in runs]
        if recorded and (not page.exists() or page.stat().st_mtime_ns < max(recorded)):
            write_page([path], page)


def linger(server: PageServer) -> None:
    """Wait until the readers of a page have had the time to see the end, if there are any."""
    if time.monotonic() - server.asked_at < _READER_S:
        time.sleep(_READER_S)


def _extra(subject: Subject, runs: Sequence[Run]) -> tuple[Sequence[str], str]:
    """What a planned comparison can see, and its rungs if it is measured."""
    planned = subject.planned
    if planned is None or not planned.compared:
        return [], ""
    rows = rows_of(planned)
    family, calm = list(planned.family), planned.is_calm
    results = arm_results(rows, planned.reference, family, planned.parameters, is_calm=calm)
    last = planned.compared[0]
    gaps = {one.arm: dict(one.gaps) for one in results if one.rung == last.rung} or _gaps(runs)
    arms, seeds = len(planned.family), len(planned.seeds)
    sight = power_text(seeds, arms, last.tokens, planned.parameters, gaps, calm)
    return [sight], _rungs(subject, rows, results)


def _gaps(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """The gaps of the runs that are done, if the reference's are among them."""
    done = [run for run in runs if run.status == "done"]
    return paired_gaps(done) if done and done[0] is runs[0] else {}


def _rungs(subject: Subject, rows: Sequence[Row], results: Sequence[ArmResult]) -> str:
    if not rows or subject.planned is None or subject.folder is None:
        return ""
    try:
        probe = json.loads((subject.folder / PROBE).read_bytes())
    except (OSError, ValueError):
        probe = None
    known = probe if isinstance(probe, dict) and "recipes" in probe else None
    return rungs_section(rows, results, subject.planned.parameters, known)
