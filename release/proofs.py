"""Runs the proofs of `proofs.toml` whose files have changed since they last passed.

    python release/proofs.py [--all] [--keep NAME ...]

A digest covers the paths and contents of the files that a proof names, as git lists them. `--keep` writes the
digest of a proof that has passed; `--all` runs every proof.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")


def digest_of(patterns: list[str]) -> str:
    """The digest of the files that git tracks under these paths or patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    total = hashlib.sha256()
    for name in filter(None, listed.stdout.split("\0")):
        total.update(f"{name}\0".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return total.hexdigest()[:16]


def keep(name: str, digest: str) -> None:
    """Writes a digest into the table."""
    text = TABLE.read_text(encoding="utf-8")
    section = re.compile(rf'(^\[{re.escape(name)}\]$.*?^digest = )"\w*"', re.MULTILINE | re.DOTALL)
    TABLE.write_text(section.sub(rf'\g<1>"{digest}"', text, count=1), encoding="utf-8")


def main(words: list[str]) -> int:
    """The number of proofs that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run every proof")
    parser.add_argument("--keep", nargs="+", default=[], metavar="NAME", help="write the digests of these")
    given = parser.parse_args(words)
    proofs = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    failed = 0
    for name, proof in proofs.items():
        digest = digest_of(proof["files"])
        if name in given.keep:
            keep(name, digest)
        elif not given.keep and (given.all or digest != proof["digest"]):
            print(f"{name}: {proof['command']}", flush=True)
            failed += subprocess.run(proof["command"], shell=True, cwd=ROOT, check=False).returncode != 0
        elif not given.keep:
            print(f"{name}: unchanged since it passed")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
