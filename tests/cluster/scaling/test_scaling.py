"""The arithmetic of scaling on times whose truth is known, the clock, and the grids that are measured."""

import math
import statistics
from dataclasses import replace

import pytest

from narrowgauge.trainer.cluster.scaling.scaling import _plans
from narrowgauge.trainer.cluster.scaling.statistics import Row, against, break_even, of_rounds, verdict
from narrowgauge.trainer.training import make_config

ONE = Row("strong", 1, 2, 8, 8, 1000, 9, 100.0, (99.0, 100.0, 101.0), 98.0, 99.0, 0.0, 0.0, {}, {})


def row(mode, processes, tokens, step_ms, communication=0.0, **more):
    values = {"mode": mode, "processes": processes, "threads": 1, "tokens_a_step": tokens, "step_ms": step_ms}
    rounds = tuple(step_ms * one / 100 for one in (99, 100, 101))
    return replace(ONE, **values | {"round_ms": rounds, "communication": communication} | more)


def rows(strong_ms, weak_ms, communication=0.2):
    """One process and four of 1000 tokens in all, and for each."""
    every = [ONE, replace(ONE, mode="weak")]
    every += [row("strong", 4, 1000, strong_ms, communication), row("weak", 4, 4000, weak_ms, 0.02)]
    return compared_rows(every)


def compared_rows(every):
    weak = {r.processes: r for r in every if r.mode == "weak"}
    return [against(r, next(f for f in every if f.mode == r.mode), weak) for r in every]


def test_speed_up_and_efficiency():
    *_, strong, weak = rows(strong_ms=50.0, weak_ms=125.0)
    assert (strong.speed_up, strong.efficiency) == (2.0, 0.5)
    assert (weak.speed_up, weak.efficiency) == (pytest.approx(3.2), pytest.approx(0.8))
    assert (strong.tokens_per_s, strong.as_json()["communication_ms"]) == (20_000, pytest.approx(10))


@pytest.mark.parametrize(("processes", "fixed_ms"), [(2, 30.0), (4, 7.5)])
def test_the_break_even_is_where_both_take_the_same_time(processes, fixed_ms):
    """Of a machine that computes 0.1 ms a token in each process and communicates for a fixed time."""
    tokens = 1000 * processes
    step = 1000 * 0.1 + fixed_ms
    found = break_even(ONE, row("weak", processes, tokens, step, fixed_ms / step))
    assert found is not None
    total = found * processes
    assert total * 0.1 == pytest.approx(total / processes * 0.1 + fixed_ms)
    assert break_even(ONE, row("weak", 2, 2000, 250.0, 0.1)) is None, "the pieces compute no faster"
    assert break_even(ONE, row("weak", 2, 2000, 100.0, 0.0)) == 0


def test_the_slowest_process_tells_the_time_and_all_tell_the_waiting():
    fast = {"seconds": [1.0, 1.1, 0.9, 5.0], "waiting": [0.3, 0.3, 0.3], "starved": [0.0], "on_core": [0.7]}
    slow = {"seconds": [2.0, 2.1, 1.9, 2.0], "waiting": [0.1, 0.1, 0.9], "starved": [0.2], "on_core": [1.4]}
    first = [each | {"sent": {}, "calls": {}} for each in (fast, slow)]
    found = of_rounds([first], 2)
    assert (found["round_ms"], found["step_ms_best"], found["on_core_ms"]) == ((2000,), 1900, 1400)
    for name, expected in (("step_ms", 2000), ("communication", 0.2), ("starved", 0.1)):
        assert found[name] == pytest.approx(expected), name
    assert of_rounds([first[:1]], 1)["communication"] == 0, "a single process sends nothing"
    twice = of_rounds([first, [first[0], first[1] | {"seconds": [8.0]}]], 2)
    assert (twice["round_ms"], twice["steps"]) == ((2000, 8000), 5)
    assert twice["step_ms"] == pytest.approx(4000), "the geometric mean of the rounds"


def two(rounds, one=(100, 100, 100), starved=0.0):
    """One process and two on the same 1000 tokens and on as many for each, whose rounds take these times."""
    every = [replace(ONE, round_ms=one), replace(ONE, mode="weak", round_ms=one)]
    step_ms = math.prod(rounds) ** (1 / len(rounds))
    for mode, tokens in (("strong", 1000), ("weak", 2000)):
        every.append(row(mode, 2, tokens, step_ms, starved=starved, round_ms=rounds))
    return compared_rows(every)


def test_the_interval_of_a_speed_up_is_students_over_the_rounds():
    *_, strong, weak = two((50.0, 60.0, 55.0))
    logs = [math.log(100 / ms) for ms in (50, 60, 55)]
    half = 4.3027 * statistics.stdev(logs) / math.sqrt(3)
    assert strong.speed_up == pytest.approx(math.exp(statistics.mean(logs)))
    ends = [math.exp(statistics.mean(logs) + sign * half) for sign in (-1, 1)]
    assert strong.speed_up_interval == pytest.approx(ends, rel=1e-4)
    assert weak.speed_up_interval == pytest.approx([2 * end for end in ends], rel=1e-4)
    *_, drifting, _ = two((50.0, 100.0, 60.0), one=(100.0, 200.0, 120.0))
    assert drifting.speed_up_interval == pytest.approx((2, 2)), "drift common to both sizes cancels"
    *_, once, _ = two((50.0,), one=(100.0,))
    assert (once.speed_up, once.speed_up_interval) == (pytest.approx(2), None)


def test_the_verdict_says_what_is_proven():
    fast = "1.82x as fast as one on the same batch (95 % interval 1.45 .. 2.29): faster"
    every = [
        (two((50, 60, 55)), False, fast),
        (two((150.0, 151.0, 152.0)), False, "slower, because the interval is below 1"),
        (two((80, 99, 120)), False, "no proof, because the interval includes 1; take more --rounds"),
        (two((50.0,), one=(100.0,)), False, "no proof, because one round has no interval"),
        (two((50.0, 51.0, 52.0), starved=0.3), False, "no proof, because other programs used the cores"),
        (rows(50.0, 125.0), False, "larger micro-batches would help"),
        (rows(90.0, 400.0, 0.05), True, "share the cores that fewer had"),
        ([ONE, replace(ONE, mode="weak")], True, "name more with --procs"),
    ]
    for measured, same_cores, words in every:
        assert words in verdict(measured, same_cores), words


def test_strong_divides_the_batch_and_weak_multiplies_it():
    config = make_config({"training": {"batch_size": 12, "micro_batch_size": 4, "device": "cpu"}})
    plans = {mode: plan.training for mode, plan in _plans(config, 6).items()}
    assert (plans["strong"].batch_size, plans["strong"].micro_batch_size) == (12, 2)
    assert (plans["weak"].batch_size, plans["weak"].micro_batch_size) == (72, 4)
    assert list(_plans(config, 1)) == ["strong"]
