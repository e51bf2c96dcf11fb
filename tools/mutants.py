"""Plants the faults of `mutants.toml`, one at a time, and finds the test of the quick tier that sees each.

    python tools/mutants.py [--only TEXT] [--jobs N] [--tier quick|both] [--near] [--unfound] [--check]

Each worker has a copy of the checkout, so the checkout itself stays as it is. The test that found a fault
last time runs first; where it passes, the folders that the fault names, then all tests. A fault that no test
finds is a missing test, and the exit code says so. `--check` only sees that each fault still applies.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
WRITING = threading.Lock()
TIERS = {"quick": "not thorough and not nightly", "both": "not nightly"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: a text of a file below src/narrowgauge, what replaces it, and the test that finds it.

    Attributes:
        file: The path below src/narrowgauge.
        before: A text that stands once in the file.
        after: The fault.
        near: The folders or files of tests that should find it; by default the folder of its room.
        found_by: The test that found it last; "" if none did.
    """

    file: str
    before: str
    after: str
    near: str = ""
    found_by: str = ""

    def plant(self, package: Path) -> str:
        """Writes the fault into a copy of the package, and returns the text that was there.

        Raises:
            ValueError: The text to replace does not stand there exactly once.
        """
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if (times := text.count(self.before)) != 1:
            raise ValueError(f"{self.file} has {self.before!r} {times} times: renew the fault")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")
        return text

    def searches(self, is_near: bool) -> Iterator[str]:
        """The tests to run, nearest first; with `is_near`, all others are left out."""
        if self.found_by:
            yield self.found_by
        yield self.near or f"tests/{self.file.partition('/')[0]}"
        if not is_near:
            yield "tests"


def applies(mutant: Mutant, package: Path) -> bool:
    """Whether a fault can be planted; prints why not."""
    try:
        original = mutant.plant(package)
    except (OSError, ValueError) as error:
        print(error)
        return False
    (package / mutant.file).write_text(original, encoding="utf-8")
    return True


def load() -> list[Mutant]:
    """The faults of the table."""
    return [Mutant(**one) for one in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]]


def copy_to(folder: Path) -> Path:
    """Copies the files of the checkout that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def first_failure(copy: Path, tests: str, tier: str) -> str:
    """The id of the first test that fails in a copy of the checkout; "" if all pass."""
    options = ["-q", "-x", "--tb=no", "-rfE", "-p", "no:xdist", "-p", "no:support.cost", "-m", TIERS[tier]]
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *([tests] if "::" in tests else tests.split())],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 or (done.returncode in (4, 5) and "::" in tests):  # the recorded test may be gone
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else f"exit code {done.returncode}"


def hunt(mutant: Mutant, copies: "queue.Queue[Path]", tier: str, is_near: bool) -> str:
    """The test that finds a fault; "" if none does."""
    copy = copies.get()
    original = mutant.plant(copy / "src" / "narrowgauge")
    try:
        found = next(filter(None, (first_failure(copy, t, tier) for t in mutant.searches(is_near))), "")
    finally:
        (copy / "src" / "narrowgauge" / mutant.file).write_text(original, encoding="utf-8")
        copies.put(copy)
    with WRITING:
        keep(mutant, found)
    print(f"{mutant.file}: {mutant.after!r}: {found or 'SURVIVES'}", flush=True)
    return found


def keep(mutant: Mutant, found: str) -> None:
    """Writes into the table which test found a fault."""
    parts = TABLE.read_text(encoding="utf-8").split("[[mutant]]\n")
    number = 1 + [(m.file, m.before) for m in load()].index((mutant.file, mutant.before))
    body = re.sub(r"^found_by = .*\n?", "", parts[number], flags=re.MULTILINE).rstrip("\n")
    parts[number] = f"{body}\nfound_by = '''{found}'''\n" + "\n" * (number < len(parts) - 1)
    TABLE.write_text("[[mutant]]\n".join(parts), encoding="utf-8")


def main() -> int:
    """The number of faults that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose file or text holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at a time")
    parser.add_argument("--tier", choices=TIERS, default="quick", help="the tests that may find them")
    parser.add_argument("--check", action="store_true", help="only see that each fault applies")
    parser.add_argument("--near", action="store_true", help="leave out the tests that a fault does not name")
    parser.add_argument("--unfound", action="store_true", help="only faults that no test is recorded to find")
    given = parser.parse_args()
    chosen = [
        m
        for m in load()
        if (given.only in m.file or given.only in m.after) and not (given.unfound and m.found_by)
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(1 if given.check else given.jobs):
            copies.put(copy_to(Path(folder) / str(number)))
        stale = sum(not applies(mutant, copies.queue[0] / "src" / "narrowgauge") for mutant in chosen)
        if given.check or stale:
            return stale
        tests = pool.map(lambda m: hunt(m, copies, given.tier, given.near), chosen)
        found = dict(zip(chosen, tests, strict=True))
    survivors = sum(not test for test in found.values())
    print(f"{len(found) - survivors} of {len(found)} faults found by the {given.tier} tests")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
