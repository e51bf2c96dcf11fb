"""Builds the sdist and the wheel, and uses the wheel as a user would, in an environment of its own.

    python release/check.py [--torch torch==2.13.0] [--keep FOLDER]

The wheel is built from the sdist, so a file that the sdist lacks is missing in both. The environment has the
wheel, torch, and what the wheel requires; mypy is the one of the Python that runs this. Every step prints its
command and what it took.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: A model and a run that take seconds.
RUN = {"layers": 1, "dim": 64, "heads": 2, "kv-heads": 2, "ffn-dim": 128, "sequence-length": 64}
RUN |= {"batch-size": 2, "steps": 20}
PROGRAM = """\
import torch

import narrowgauge as ng

recipe: ng.Recipe = ng.recipe("fp8")
q: ng.QTensor = ng.quantize(torch.randn(4, 64), "mxfp4")
names: list[str] = ng.recipe_names()
print(recipe.name, len(names), ng.format("e4m3").max, ng.__version__)
"""


def run(command: Sequence[str | Path], folder: Path, last: int = 1) -> str:
    """Runs a command, prints it with its last lines, and returns what it printed.

    Raises:
        SystemExit: The command failed.
    """
    began = time.monotonic()
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    print(f"$ {' '.join(words)}  ({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\nexit code {done.returncode}")
    for line in done.stdout.rstrip().split("\n")[-last:] if last else ():
        print(f"  {line}", flush=True)
    return done.stdout


def build(dist: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    for old in dist.glob("narrowgauge-*"):
        old.unlink()
    run([sys.executable, "-m", "build", "--outdir", dist, ROOT], ROOT)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def require_same_package(sdist: Path, wheel: Path) -> None:
    """Requires every file of the package in the checkout to be in both archives, and nothing else."""
    tracked = subprocess.run(
        ["git", "ls-files", "src/narrowgauge"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    expected = {name.removeprefix("src/") for name in tracked}
    in_wheel = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("narrowgauge/")}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    in_sdist = {n.removeprefix("src/") for n in names if n.startswith("src/narrowgauge/") and "." in n}
    for archive_name, found in ((wheel.name, in_wheel), (sdist.name, in_sdist & expected)):
        if found != expected:
            sys.exit(f"{archive_name} differs from the checkout in {sorted(found ^ expected)[:10]}")
    if missing := {"LICENSE", "README.md", "pyproject.toml"} - names:
        sys.exit(f"{sdist.name} has no {', '.join(missing)}")


def main() -> None:
    """Builds, installs, and uses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="the torch to install, as pip takes it")
    parser.add_argument("--keep", type=Path, help="where the environment stays")
    options = parser.parse_args()
    sdist, wheel = build(ROOT / "dist")
    require_same_package(sdist, wheel)
    with tempfile.TemporaryDirectory() as temporary:
        home = options.keep or Path(temporary)
        python, program = home / "env" / "bin" / "python", home / "use.py"
        run([sys.executable, "-m", "venv", home / "env"], ROOT, last=0)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        run([*pip, options.torch, wheel], home, last=0)
        run([python, "-m", "pip", "check"], home)
        command = home / "env" / "bin" / "narrowgauge"
        run([command, "--help"], home)
        program.write_text(PROGRAM, encoding="utf-8")
        run([python, program], home)
        mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
        run([*mypy, "--cache-dir", home / "mypy", program], home)
        text = home / "text.txt"
        text.write_text("a quick brown fox jumps over the lazy dog\n" * 4000, encoding="utf-8")
        words = [word for key, value in RUN.items() for word in (f"--{key}", str(value))]
        run([command, "train", "--data", text, "--out", "run", *words], home, last=4)
        if not (home / "run" / "report.html").is_file():
            sys.exit("the run left no report")
    print(f"{sdist.name} and {wheel.name} are in dist/")


if __name__ == "__main__":
    main()
