"""Library x format x case: `python conformance/matrix.py [LIBRARY ...] [--environments FOLDER]`.

Asks every library that can be imported the questions of cases.py, and writes its rows of matrix.csv. A
library runs in FOLDER/LIBRARY/bin/python if that is there (`--install` makes it), else in this Python. The
verdict of a row:

    equal     codes and scales equal the oracle's, bit for bit
    values    the values are, to the last bits of float32; a code or a scale differs, or none was returned
    differs   a value differs
    fails     the library raised an exception
"""

import argparse
import ast
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cases import DRAWS, FORMATS, Case, cases, grid
from narrowgauge.formats import format

HERE = Path(__file__).parent
TABLE = HERE / "matrix.csv"
COLUMNS = ("library", "version", "date", "format", "case", "verdict", "differ", "first")
LAST_BITS = 2.0**-21  # two results of a few float32 operations in another order
DEVIATIONS = 5.0  # of a share of draws from its probability
Row = dict[str, str]


def main(words: list[str] | None = None) -> int:
    """Ask the libraries, write their rows, and say how many of each verdict there are."""
    parser = argparse.ArgumentParser(description="compare libraries with the oracle, case by case")
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="names of adapters; all without one")
    parser.add_argument("--environments", type=Path, metavar="FOLDER", help="of virtual environments")
    parser.add_argument(
        "--install", action="store_true", help="make the environments of these libraries first"
    )
    options = parser.parse_args(words)
    kept = {row_key(r): r for r in read()}
    for name in options.libraries or names():
        if options.install:
            install(name, options.environments)
        rows = ask(name, options.environments)
        if rows is None:
            continue
        kept = {k: r for k, r in kept.items() if r["library"] != name}
        kept |= {row_key(r): r for r in rows}
        found = [r["verdict"] for r in rows]
        print(f"{name:20}", *(f"{v} {found.count(v)}" for v in dict.fromkeys(sorted(found))), sep="  ")
    write(kept.values())
    return 0


def names() -> list[str]:
    """The libraries that have an adapter."""
    return sorted(p.stem.removesuffix("_adapter") for p in (HERE / "adapters").glob("*_adapter.py"))


def row_key(row: Row) -> tuple[str, ...]:
    """What identifies a row."""
    return tuple(row[c] for c in ("library", "format", "case"))


def read(path: Path = TABLE) -> list[Row]:
    """The rows of the table."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write the table, in the order of libraries, formats and cases."""
    order = {name: i for i, name in enumerate(FORMATS)}
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(rows, key=lambda r: (r["library"], order[r["format"]])))


@cache
def questions(name: str) -> tuple[Case, ...]:
    """The cases of a format; made once for all libraries."""
    return tuple(cases(name))


def ask(library: str, environments: Path | None, formats: Iterable[str] = FORMATS) -> list[Row] | None:
    """The rows of a library, or none if it cannot be imported; a line on standard error says why."""
    own = environments / library / "bin" / "python" if environments else Path()
    python = str(own) if environments and own.exists() else sys.executable
    asked = [case for name in formats for case in questions(name)]
    text = "\n".join(json.dumps(_question(case)) for case in asked)
    command = [python, str(HERE / "answer.py"), str(HERE / "adapters" / f"{library}_adapter.py")]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(asked) + 1:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"{library}: {reason}", file=sys.stderr)
        return None
    first, *answers = map(json.loads, lines)
    known = {"library": library, "version": first["version"], "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    rows = []
    for case, given in zip(asked, answers, strict=True):
        if given.get("verdict") != "is not there":
            verdict, differ, where = judge(case, given)
            rows.append(
                known
                | {"format": case.format, "case": case.name, "verdict": verdict}
                | {"differ": f"{differ:.3g}" if differ else "", "first": where}
            )
    return rows


def _question(case: Case) -> Mapping[str, Any]:
    given: dict[str, Any] = {"asks": case.asks, "cast": {"scale": None} | dict(case.cast)}
    if case.x is None:
        return given | {"codes": case.codes.tolist(), "scales": case.scales.tolist()}
    return given | {"x": [float(v).hex() for v in case.x.ravel()], "shape": case.x.shape}


def judge(case: Case, given: Mapping[str, Any]) -> tuple[str, float, str]:
    """(verdict, share of values that differ, the first of them in words)."""
    if given.get("verdict") == "fails":
        return "fails", 1.0, given["why"]
    got = {
        k: np.array([float.fromhex(v) if isinstance(v, str) else v for v in vs]) for k, vs in given.items()
    }
    if case.asks == "stochastic":
        drawn = got["values"] if "values" in got else _values(case, got)
        return _law(case, drawn.reshape(case.x.shape))
    due = case.values.astype(np.float64).ravel()
    values = got["values"] if "values" in got else _values(case, got)
    if values.size != due.size:
        return "fails", 1.0, f"{values.size} values, {due.size} are due"
    same = (values == due) | (np.isnan(values) & np.isnan(due))
    with np.errstate(invalid="ignore"):
        close = np.abs(values - due) <= LAST_BITS * np.abs(due)
    wrong = ~(same | close)
    if wrong.any():
        i = int(np.argmax(wrong))
        of = "" if case.x is None else f" of {case.x.ravel()[i]:.9g}"
        return "differs", float(wrong.mean()), f"value{of} at {i} is {values[i]:.9g}, due is {due[i]:.9g}"
    return ("equal" if _same_bits(case, got, same) else "values"), 0.0, _first_bits(case, got)


def _same_bits(case: Case, got: Mapping[str, Any], same: Any) -> bool:
    if case.asks == "dequantize" or ("values" in got and "codes" not in got):
        return bool(case.asks == "dequantize" and same.all())
    return not _first_bits(case, got)


def _first_bits(case: Case, got: Mapping[str, Any]) -> str:
    """The first code or scale that differs, in words."""
    for what, due in (("scales", case.scales), ("codes", case.codes)):
        if what not in got or case.asks == "dequantize" or not due.size:
            continue
        wrong = ~((got[what] == due.ravel()) | (np.isnan(got[what]) & np.isnan(due.ravel().astype(float))))
        if wrong.any():
            i = int(np.argmax(wrong))
            return f"{what[:-1]} {i} is {got[what][i]:.9g}, due is {due.ravel()[i]:.9g}"
    if (
        "tensor_scale" in case.cast
        and got.get("tensor_scale", np.empty(0)).size
        and got["tensor_scale"][0] != case.tensor_scale
    ):
        return f"tensor scale is {got['tensor_scale'][0]:.9g}, due is {case.tensor_scale:.9g}"
    return ""


def _values(case: Case, got: Mapping[str, Any]) -> Any:
    """What codes and scales stand for: element x scale x tensor scale, each product rounded to float32."""
    shape = case.codes.shape if case.x is None else case.x.shape
    element = _decoded(got["codes"].astype(int), case.cast["element"]).reshape(shape)
    if "scale" not in case.cast:
        return element.ravel()
    stored = case.cast["scale"]
    scales = got["scales"] if stored == "fp32" else _decoded(got["scales"].astype(int), stored)
    rows, columns = element.shape
    width = (case.cast.get("block") or [0, 0])[1] or columns
    scales = scales.reshape(-1, -(-columns // width)) if case.cast.get("block") else scales.reshape(1, 1)
    wide = np.broadcast_to(scales.repeat(width, 1)[:, :columns], (rows, columns)).astype(np.float32)
    with np.errstate(all="ignore"):
        out = element.astype(np.float32) * wide
        second = got.get("tensor_scale", np.empty(0)) if "tensor_scale" in case.cast else np.empty(0)
        return (out * np.float32(second[0] if second.size else 1)).astype(np.float64).ravel()


def _decoded(codes: Any, name: str) -> Any:
    """The values of codes of a narrow format."""
    fmt, points = format(name), grid(name)
    if fmt.twos_complement:
        half = 2 ** (fmt.bits - 1)
        return ((codes + half) % (2 * half) - half) * fmt.smallest_subnormal
    mask = 2 ** (fmt.bits - fmt.signed) - 1
    table = np.full(mask + 1, np.nan)
    table[: len(points)] = points
    if fmt.infinity_code is not None:
        table[fmt.infinity_code & mask] = np.inf
    out = table[codes & mask] * np.where(fmt.signed & (codes > mask), -1.0, 1.0)
    if fmt.nan_code is not None:
        out[codes == fmt.nan_code] = np.nan
    return out


def _law(case: Case, values: Any) -> tuple[str, float, str]:
    """Each value becomes one of its neighbours, the upper one as often as its share of the gap says."""
    below, above, shares = case.codes
    signed = np.concatenate([np.stack([below, above]), -np.stack([below, above])], 1)
    for i, (low, high, share) in enumerate(zip(*signed, np.tile(shares, 2), strict=True)):
        drawn = values[i][1:] if "scale" not in case.cast else values[i][case.x[i] != case.x[0, 0]]
        up = float((drawn == high).mean())
        if not ((drawn == low) | (drawn == high)).all():
            return "differs", 1.0, f"a value between {low:g} and {high:g} became neither"
        if abs(up - share) > DEVIATIONS * (share * (1 - share) / DRAWS) ** 0.5:
            return (
                "differs",
                1.0,
                f"{share:.3f} of the way from {low:g} to {high:g} went up {up:.4f} of the time",
            )
    return "equal", 0.0, ""


def install(library: str, environments: Path | None) -> None:
    """Make the environment of a library: this Python's packages, and those that its adapter requires."""
    if environments is None:
        raise SystemExit("--install needs --environments FOLDER, where the environments are made")
    source = (HERE / "adapters" / f"{library}_adapter.py").read_text(encoding="utf-8")
    required: list[str] = []
    for node in ast.parse(source).body:
        target = getattr(node, "targets", [getattr(node, "target", None)])[0]
        if isinstance(node, ast.Assign | ast.AugAssign) and ast.unparse(target) == "REQUIRES":
            required += ast.literal_eval(node.value)
    if not required:  # a checkout
        return
    folder = environments / library
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    parents = [p for p in sys.path if p.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({p!r})" for p in parents]  # their own .pth files too
    (site / "zz-parent.pth").write_text("\n".join(lines), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--no-deps",
    ]
    subprocess.run([*command, *required], check=True)


if __name__ == "__main__":
    sys.exit(main())
