"""How much of what gaps deviate comes from the held-out tokens: the same models on few and on many.

    python experiments/held_out.py runs/ladder2/stages/300k-25 --arms null-1,null-2

Each arm of a comparison is validated beside the reference of its seed on each number of tokens. A row of
docs/evidence/ladder2/held-out.csv has the gap and its sampling error (`report/verdict/groups.py`), both in
percent. Rows that are there are not measured again; `make ladder2` turns them into a table.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

from ladder2 import ROWS
from narrowgauge.kernels.dispatch import choose_attention, choose_products
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.report.verdict.verdict import error_percent, gap_percent
from narrowgauge.trainer.runs import open_run, validation_loss
from narrowgauge.trainer.runs.loop.validation import ValidationLoss
from narrowgauge.trainer.runs.use.trained_model import held_out_batches, run_data
from publish.held_out import COLUMNS, Measured, read_measured
from publish.ladder2 import REFERENCE

FILE = ROWS / "held-out.csv"
HELD_OUT = (1_048_576, 65_536)  # of the parts of ladder 2


def main() -> None:
    """Measure what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, nargs="+", help="directories of comparisons")
    parser.add_argument("--arms", default="null-1,null-2")
    options = parser.parse_args()
    choose_products("bf16")
    choose_attention("in-order")
    for out in options.out:
        for run in filter(Path.is_dir, sorted(out.glob(f"{REFERENCE}-seed-*"))):
            seed = int(run.name.rpartition("-")[2])
            done = {(one.arm, one.seed) for one in read_measured(FILE)}
            left = [arm for arm in options.arms.split(",") if (arm, seed) not in done]
            if left:
                _append(measure(out, seed, left))


def measure(out: Path, seed: int, arms: Iterable[str]) -> list[Measured]:
    """The gap of each arm on each number of held-out tokens."""
    base = losses(out / f"{REFERENCE}-seed-{seed}")
    rows = []
    for arm in arms:
        mine = losses(out / f"{arm}-seed-{seed}")
        for tokens, found in mine.items():
            gap = gap_percent(found.mean, base[tokens].mean)
            error = error_percent(found.parts, base[tokens].parts, base[tokens].mean)
            rows.append(Measured(arm, seed, tokens, gap, error))
            print(rows[-1], flush=True)
    return rows


def losses(run: Path) -> dict[int, ValidationLoss]:
    """The loss of a run on each number of held-out tokens."""
    trained = open_run(run, "cpu")
    text, engine = run_data(trained, None, lambda _: None).val, Engine.of_one_process(trained.model)
    found = {}
    for tokens in HELD_OUT:
        sequences = tokens // trained.config.data.sequence_length
        batches = held_out_batches(trained.config, text, sequences=sequences)
        found[tokens] = validation_loss(engine, trained.go_to_sample, batches)
    return found


def _append(rows: Iterable[Measured]) -> None:
    is_new = not FILE.exists()
    with FILE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for one in rows:
            writer.writerow([one.arm, one.seed, one.tokens, f"{one.gap:.4f}", f"{one.error:.4f}"])


if __name__ == "__main__":
    main()
