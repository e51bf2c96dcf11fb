"""Makes the rows of the atlas that others publish as tables, and keeps those that were read by hand.

    python experiments/atlas.py --quartet2 quartet2_runs.csv --quartet plots.ipynb

`--quartet2` is for_plots/runs.json of IST-DASLab/Quartet-II @ 8776a90 as a table, one run a row; `--quartet`
is notebooks/plots.ipynb of IST-DASLab/Quartet @ 5b9d74c, whose second cell holds the losses. The rows of our
own ladder come from docs/evidence/runs.csv. Rows of a source that is not given stay as they are.
"""

import argparse
import ast
import csv
import json
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from narrowgauge.forecast.atlas import COLUMNS
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole

ROOT = Path(__file__).parents[1]
ATLAS = ROOT / "src" / "narrowgauge" / "forecast" / "atlas.csv"
LADDER = ROOT / "docs" / "evidence" / "runs.csv"
MORE = ("gap_error", "corpus", "model", "unit", "matched", "note", "read")
BATCH = 512 * 512  # tokens of an iteration in both Quartets
SAME = "bf16 run of the same parameters and tokens"

QUARTET2 = {
    "source": "Quartet II, arXiv 2601.22813; IST-DASLab/Quartet-II @ 8776a90",
    "date": "2026-02-20",
    "family": "quartet2",
    "seeds": "1",
    "tail_share": "0",
    "corpus": "C4",
    "model": "Llama; parameters without embeddings",
    "unit": "nats",
    "matched": SAME,
    "read": "file, 2026-11-25",
}
QUARTET = QUARTET2 | {
    "source": "Quartet, arXiv 2505.14669; IST-DASLab/Quartet @ 5b9d74c",
    "date": "2025-10-14",
    "family": "quartet",
}
OWN = {
    "source": "narrowgauge, docs/evidence/runs.csv",
    "date": "2026-11-21",
    "family": "ladder",
    "corpus": "public-domain novels and documentation",
    "model": "ladder-1m; parameters of linear layers without the head",
    "unit": "nats",
    "matched": "mean of both bf16 runs of the same seed and tokens",
    "read": "file, 2026-11-25",
}
SIZES = {"30M": 30482560, "50M": 49556736, "100M": 102777856, "200M": 203188480}
LADDER_PARAMETERS = 851_968
WIDE_ARMS = ("bf16", "bf16-again")
# Remarks of the table's own notebook on some of its runs.
NOTES = {
    ("BF16", "QuEST"): "cell 30: diverges for some runs",
    (
        "AlbertTsengQuantizer",
        "BF16",
        91552,
    ): "above the loss of half the tokens: a slip in the table, or a bad run",
}

# The scheme of a pair (forward, backward) of Quartet's notebook.
QUARTET_SCHEMES = {
    ("QuEST", "BF16"): "mxfp4-quest-forward",
    ("QuEST", "AlbertTsengQuantizer"): "mxfp4-quest",
    ("BF16", "AlbertTsengQuantizer"): "mxfp4-stochastic-backward",
    ("BF16", "AlbertTsengDeterministic"): "mxfp4-nearest-backward",
    ("BF16", "QuEST"): "mxfp4-quest-backward",
    ("AlbertTsengQuantizer", "BF16"): "mxfp4-stochastic-forward",
    ("AlbertTsengDeterministic", "BF16"): "mxfp4-hadamard-forward",
    ("QuESTNoQuantScale", "BF16"): "fp4-quest-forward",
    ("BF16", "Eden32"): "mxfp4-eden-backward",
    ("BF16", "Eden128"): "mxfp4-eden-backward-128",
    ("Eden32", "BF16"): "mxfp4-eden-forward",
    ("Eden128", "BF16"): "mxfp4-eden-forward-128",
}
LADDER_ARMS = {
    "mxfp4": ("mxfp4", 0.0),
    "nvfp4": ("nvfp4", 0.25),  # 15 % of four blocks, rounded up to one
    "mxfp8": ("mxfp8", 0.0),
    "mxfp4-forward": ("mxfp4-forward", 0.0),
    "nvfp4-nearest": ("nvfp4-nearest", 0.25),
    "nvfp4-no-tail": ("nvfp4", 0.0),
}


def quartet2_scheme(run: Mapping[str, str]) -> str:
    """The scheme of one of Quartet II's runs, from the settings in its row."""
    six = run["sfour_over_six"] == "True"
    match run["group"]:
        case "nvidia":
            return "nvfp4-random-signs-4over6" if six else "nvfp4-random-signs"
        case "tetrajetv2":
            return "tetrajet2-tensor"
        case "quartetv2":
            return (
                "quartet2-128" if six else {"128": "nvfp4-eden", "32": "nvfp4-eden-32"}[run["shadamard_dim"]]
            )
        case "backward_quartet":
            return {"sr": "mxfp4-stochastic-backward", "no": "mxfp4-nearest-backward"}[run["bunbiased"]]
        case "orig_albert_tseng" | "fixed_albert_tseng":
            return "mxfp4-stochastic-backward" if run["bstochastic"] == "True" else "mxfp4-nearest-backward"
        case "forward_quartet":
            return "nvfp4-rms-forward" + ("-hadamard" if run["fhadamard_dim"] == "16" else "")
        case "forward_main":
            square = "square-" if run["fsquare"] == "True" else ""
            ends = {"ffour_over_six": "-4over6", "fhadamard_dim": "-hadamard"}
            end = ends["ffour_over_six"] if run["ffour_over_six"] == "True" else ""
            end += ends["fhadamard_dim"] if run["fhadamard_dim"] == "16" else ""
            return f"nvfp4-{square}forward" + ("-clipped" if run["fscale_override"] == "0.92" else end)
        case "backward_main" | "bnrq":
            rounding = {"eden": "nvfp4-eden", "sr": "nvfp4-stochastic"}[run["bunbiased"]]
            gemms = {
                "Q(E)Q(Wt)t_Q(Et)Q(Xt)t": "backward",
                "Q(E)Q(Wt)t_EtX": "dgrad",
                "EW_Q(Et)Q(Xt)t": "wgrad",
                "Q(E)W_EtX": "gradient",
                "Q(E)W_Q(Et)Q(Xt)t": "gradient-wgrad",
            }
            return f"{rounding}-{gemms[run['bbackward_scheme']]}"
    raise UserError(f"group {run['group']!r} of Quartet II has no scheme; add it to quartet2_scheme")


def quartet2_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of Quartet II's runs; its bf16 runs are the references."""
    runs = read_csv(path)
    wide = {(run["N"], run["D"]): float(run["final_loss"]) for run in runs if run["group"] == "baseline"}
    number = dict.fromkeys((run["group"] for run in runs), -1)
    for run in runs:
        group, at = run["group"], (run["N"], run["D"])
        number[group] += 1
        if group == "baseline" or at not in wide:
            continue
        yield row(
            QUARTET2,
            locator=f"for_plots/runs.json, {group}[{number[group]}]",
            params=run["N"],
            tokens=run["D"],
            recipe=quartet2_scheme(run),
            loss=float(run["final_loss"]),
            reference=wide[at],
            note="amax of the step before" if run["sdelayed_amax"] == "True" else "",
        )


def quartet_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of Quartet's table, the literal of the second cell of its notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    statement = ast.parse("".join(cells[1]["source"])).body[0]
    assert isinstance(statement, ast.Assign)
    table: dict[str, Any] = ast.literal_eval(statement.value)
    for size, of_size in table.items():
        for forward, of_forward in of_size.items():
            for backward, losses in of_forward.items():
                name = QUARTET_SCHEMES.get((forward, backward))
                for iterations, loss in losses.items() if name else ():
                    yield row(
                        QUARTET,
                        locator=f"notebooks/plots.ipynb, cell 2, {size}, {forward}, {backward}, {iterations}",
                        params=str(SIZES[size]),
                        tokens=str(iterations * BATCH),
                        recipe=str(name),
                        loss=loss,
                        reference=of_size["BF16"]["BF16"][iterations],
                        note=NOTES.get((forward, backward), NOTES.get((forward, backward, iterations), "")),
                    )


def ladder_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of our own ladder: the mean over seeds of each arm and length."""
    runs = [run for run in read_csv(path) if run["status"] == "done"]
    for arm, (recipe, tail) in LADDER_ARMS.items():
        for rung in sorted({run["rung"] for run in runs if run["arm"] == arm}):
            group = [run for run in runs if run["arm"] == arm and run["rung"] == rung]
            own = [float(run["own_loss"]) for run in group]
            wide = [
                mean(float(r["own_loss"]) for r in runs if r["arm"] in WIDE_ARMS and same(r, run))
                for run in group
            ]
            gaps = [100 * (a - b) / b for a, b in zip(own, wide, strict=True)]
            yield row(
                OWN | {"seeds": str(len(group)), "tail_share": f"{tail:g}"},
                locator=f"arm {arm}, rung {rung}",
                params=str(LADDER_PARAMETERS),
                tokens=group[0]["tokens"],
                recipe=recipe,
                loss=mean(own),
                reference=mean(wide),
                gap_error=f"{stdev(gaps) / len(gaps) ** 0.5:.3f}",
                note="initial weights of one width for all layers, under which equal runs part by 0.5 %",
            )


def same(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    """Whether two runs of the ladder have the same seed and length."""
    return (a["seed"], a["rung"]) == (b["seed"], b["rung"])


def row(base: Mapping[str, str], loss: float, reference: float, **values: str) -> dict[str, str]:
    """A row of the atlas: what is common to a source, and the gap of two losses."""
    gap = 100 * (loss - reference) / reference
    losses = {"gap_percent": f"{gap:.4f}", "loss": f"{loss:.6g}", "reference_loss": f"{reference:.6g}"}
    return dict.fromkeys((*COLUMNS, *MORE), "") | base | losses | values


def main() -> None:
    """Write the atlas with the rows of the given sources made again."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quartet2", type=Path, metavar="CSV")
    parser.add_argument("--quartet", type=Path, metavar="IPYNB")
    parser.add_argument("--out", type=Path, default=ATLAS)
    given = parser.parse_args()
    rows = read_csv(ATLAS) if ATLAS.exists() else []
    made = {"ladder": list(ladder_rows(LADDER))}
    if given.quartet2:
        made["quartet2"] = list(quartet2_rows(given.quartet2))
    if given.quartet:
        made["quartet"] = list(quartet_rows(given.quartet))
    tables = ("quartet2", "quartet", "ladder")
    kept = {name: [r for r in rows if r["family"] == name] for name in tables}
    others = [r for r in rows if r["family"] not in tables]
    all_rows = [*(r for name in tables for r in made.get(name, kept[name])), *others]
    lines = [[*COLUMNS, *MORE], *([r[name] for name in (*COLUMNS, *MORE)] for r in all_rows)]
    write_whole(given.out, csv_text(lines))
    print(f"{given.out}: {len(all_rows)} points")


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(StringIO(path.read_text(encoding="utf-8"), newline="")))


def csv_text(lines: list[list[str]]) -> str:
    """The text of a CSV file with the line ends of this repository."""
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"atlas: {error}")
