"""The arithmetic of scaling on times whose truth is known, the clock, and the grids that are measured."""

import time
from dataclasses import replace

import pytest

from narrowgauge.cluster.scaling.local_launch import refuse_several
from narrowgauge.cluster.scaling.scaling import _against, _dims, _plans
from narrowgauge.cluster.scaling.statistics import (
    Row,
    bandwidth,
    break_even,
    compared,
    of_ranks,
    verdict,
    warnings,
)
from narrowgauge.cluster.scaling.worker import alone, idle
from narrowgauge.errors import UserError
from narrowgauge.training import make_config

ONE = Row("strong", 1, 2, 8, 8, 1000, 9, 100.0, (99.0, 101.0), 98.0, 99.0, 0.0, 0.0, {}, {})


def row(mode, processes, tokens, step_ms, communication=0.0, threads=1, starved=0.0):
    return replace(
        ONE,
        mode=mode,
        processes=processes,
        threads=threads,
        tokens_a_step=tokens,
        step_ms=step_ms,
        communication=communication,
        starved=starved,
    )


def rows(strong_ms, weak_ms, communication=0.2):
    """One process and four of 1000 tokens in all, and for each."""
    every = [ONE, replace(ONE, mode="weak")]
    every += [row("strong", 4, 1000, strong_ms, communication), row("weak", 4, 4000, weak_ms, 0.02)]
    return [_against(r, next(f for f in every if f.mode == r.mode), every) for r in every]


def test_speed_up_and_efficiency():
    *_, strong, weak = rows(strong_ms=50.0, weak_ms=125.0)
    assert (strong.speed_up, strong.efficiency) == (2.0, 0.5)
    assert weak.speed_up == pytest.approx(3.2)
    assert weak.efficiency == pytest.approx(0.8)
    assert strong.tokens_per_s == 20_000
    assert strong.waiting_ms == pytest.approx(10)
    assert strong.as_json()["communication_ms"] == strong.waiting_ms


@pytest.mark.parametrize(("processes", "fixed_ms"), [(2, 30.0), (4, 7.5)])
def test_the_break_even_is_where_both_take_the_same_time(processes, fixed_ms):
    """Of a machine that computes 0.1 ms a token in each process and communicates for a fixed time."""
    tokens = 1000 * processes
    step = 1000 * 0.1 + fixed_ms
    found = break_even(ONE, row("weak", processes, tokens, step, fixed_ms / step))
    assert found is not None
    total = found * processes
    assert total * 0.1 == pytest.approx(total / processes * 0.1 + fixed_ms)


def test_no_break_even_where_the_pieces_compute_no_faster():
    assert break_even(ONE, row("weak", 2, 2000, 250.0, 0.1)) is None
    assert break_even(ONE, row("weak", 2, 2000, 100.0, 0.0)) == 0


def test_the_slowest_process_tells_the_time_and_all_tell_the_waiting():
    none = {"sent": {}, "calls": {}}
    fast = none | {"seconds": [1.0, 1.1, 0.9, 5.0], "waiting": [0.3, 0.3, 0.3], "starved": [0.0]}
    slow = none | {"seconds": [2.0, 2.1, 1.9, 2.0], "waiting": [0.1, 0.1, 0.9], "starved": [0.2]}
    found = of_ranks([fast | {"on_core": [0.7]}, slow | {"on_core": [1.4]}], 2)
    assert found["step_ms"] == 2000
    assert found["step_ms_best"] == 1900
    assert found["on_core_ms"] == 1400
    assert found["communication"] == pytest.approx(0.2)
    assert found["starved"] == pytest.approx(0.1)
    assert of_ranks([fast | {"on_core": [0.7]}], 1)["communication"] == 0, "alone nobody communicates"


def test_bandwidths_are_those_of_nccl_tests():
    found = bandwidth({"bytes": 4e9, "seconds": 2.0}, 4)
    assert (found["algorithm_bandwidth"], found["bus_bandwidth"]) == (2e9, 3e9)


def test_the_verdict_is_one_sentence():
    assert verdict(rows(50.0, 125.0), same_cores=False) == (
        "4 processes are 2x one on the same batch, 3.2x with as much for each; "
        "20% of the step is communication; larger micro-batches would help"
    )
    assert "share the cores that fewer had" in verdict(rows(90.0, 400.0, 0.05), same_cores=True)
    assert "name more with --procs" in verdict([ONE, replace(ONE, mode="weak")], same_cores=True)


def test_more_that_is_slower_is_a_warning():
    assert warnings(rows(50.0, 125.0), cores=4, on_cpu=True) == []
    found = warnings(rows(200.0, 125.0), cores=4, on_cpu=True)
    assert found == ["4 processes are slower than 1 (strong: 0.50x)"]
    assert "4 processes with 1 thread(s) each take turns" in warnings(rows(50.0, 125.0), 2, True)[0]
    busy = [*rows(50.0, 125.0)[:3], row("weak", 4, 4000, 125.0, starved=0.4)]
    assert "waited for a core for 40%" in warnings(busy, 4, True)[0]


def test_what_is_compared_is_said():
    one = replace(ONE, threads=4)
    assert "the same cores" in compared([one, row("strong", 4, 1000, 50.0)], cores=4, on_cpu=True)
    assert "more cores" in compared([replace(one, threads=1), row("strong", 4, 1000, 50.0)], 4, True)
    assert "1: 4, 4: 1" in compared([one, row("strong", 4, 1000, 50.0)], 4, True)


def test_what_goes_on_beside_computation_is_no_communication():
    assert alone([(0, 10)], []) == 10
    assert alone([(0, 4), (2, 10)], [(1, 3), (2, 5), (9, 20)]) == 5
    assert alone([], [(0, 3)]) == 0


def test_sleep_is_waiting_and_work_is_not():
    before = idle()
    time.sleep(0.1)
    slept = idle()
    assert 0.09 < slept.asleep - before.asleep < 0.2
    began = time.perf_counter()
    while time.perf_counter() - began < 0.1:
        pass
    after = idle()
    assert after.asleep - slept.asleep < 0.03, "neither with a core nor in want of one"


@pytest.mark.parametrize(
    ("parallel", "size", "grid"),
    [
        ({}, 4, {"shard": 4, "replicate": 1}),
        ({"replicate": 2}, 4, {"replicate": 4, "shard": 1}),
        ({"replicate": 2, "shard": 2}, 8, {"replicate": 4, "shard": 2}),
        ({"tensor": 2, "zero": 1}, 4, {"tensor": 2, "shard": 2, "zero": 1}),
        ({"replicate": 8}, 1, {"replicate": 1, "shard": 1}),
    ],
)
def test_the_number_of_processes_alone_changes(parallel, size, grid):
    parallel_dims = _dims(make_config({"parallel": parallel}), size)
    assert parallel_dims.size == size
    assert {name: getattr(parallel_dims, name) for name in grid} == grid


def test_strong_divides_the_batch_and_weak_multiplies_it():
    config = make_config({"training": {"batch_size": 12, "micro_batch_size": 4, "device": "cpu"}})
    plans = {mode: plan.training for mode, plan in _plans(config, 6, is_first=False).items()}
    assert (plans["strong"].batch_size, plans["strong"].micro_batch_size) == (12, 2)
    assert (plans["weak"].batch_size, plans["weak"].micro_batch_size) == (72, 4)
    assert list(_plans(config, 1, is_first=True)) == ["strong"]


def test_one_of_several_starts_no_worlds():
    for environ in (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    ):
        with pytest.raises(UserError, match="started 2 processes, but scaling starts its own"):
            refuse_several(environ)
    refuse_several({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})  # the shell of a batch script
    refuse_several({})
