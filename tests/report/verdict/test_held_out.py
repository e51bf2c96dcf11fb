"""The share of a gap's deviation that comes from few held-out tokens, and the note about it."""

import math
import random
import statistics

import pytest

from narrowgauge.trainer.report import read_runs, table_notes, verdicts
from narrowgauge.trainer.report.verdict.verdict import sampling_error

PARTS, TOKENS = 8, 16_384
FOUR = [4.0, 4.1, 4.2, 4.3]


@pytest.fixture
def validated(make_run):
    """`validated(recipe, parts, seed)`: a run whose last validation had these losses on its parts."""

    def make(recipe, parts, seed=1, tokens=TOKENS):
        (path,) = make_run.seeds(recipe, [statistics.fmean(parts)], seed)
        make_run.set(path, "[validation]\n", "[validation]\nbatches = 8\n")
        make_run.last_validation(path, val_tokens=tokens, val_parts=parts)
        return path

    return make


def of_seeds(validated, count, luck, noise, shift=0.0):
    """Pairs of runs: parts as hard as each other, and the luck of a whole run on every part."""
    draw, paths, gaps = random.Random(1), [], []
    for seed in range(count):
        base = [4.0 + draw.gauss(0, 0.3) for _ in range(PARTS)]  # which parts are hard does not matter
        all_parts = shift + draw.gauss(0, luck)
        other = [loss + all_parts + draw.gauss(0, noise) for loss in base]
        paths += [validated("bf16", base, seed), validated("fp8", other, seed)]
        gaps.append(100 * (statistics.fmean(other) / statistics.fmean(base) - 1))
    return read_runs(paths), gaps


def test_the_error_is_the_deviation_of_seeds_that_differ_in_nothing_else(validated):
    runs, gaps = of_seeds(validated, 40, 0.0, 0.02, shift=0.01)
    found = sampling_error(verdicts(runs))
    assert found == pytest.approx(100 * 0.02 / math.sqrt(PARTS) / 4.0, rel=0.1)
    assert found == pytest.approx(statistics.stdev(gaps), rel=0.3)


def test_runs_on_other_tokens_or_without_parts_have_no_error(validated, make_run):
    other = read_runs([validated("bf16", FOUR), validated("fp8", FOUR[::-1], tokens=2 * TOKENS)])
    bare = read_runs([make_run("a", recipe="bf16", steps=20), make_run("b", steps=20)])
    assert [sampling_error(verdicts(runs)) for runs in (other, bare)] == [None, None]
    assert not any("held-out" in note for note in table_notes(bare))


def test_the_note_of_one_seed_says_what_more_tokens_do(validated):
    runs = [validated("bf16", FOUR), validated("fp8", [4.1, 4.1, 4.2, 4.4])]
    (note,) = [note for note in table_notes(read_runs(runs)) if "held-out" in note]
    assert note.startswith("The 16,384 held-out tokens alone make a gap deviate by 0.7 %; four times as many")


@pytest.mark.parametrize(("luck", "is_told"), [(0.0, True), (0.3, False)])
def test_several_seeds_are_told_only_if_the_tokens_are_most_of_it(validated, luck, is_told):
    runs, _ = of_seeds(validated, 6, luck, 0.1)
    assert any("most of what seeds deviate" in note for note in table_notes(runs)) == is_told
