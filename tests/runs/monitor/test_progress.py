"""Plain lines of progress, by a clock of the test."""

import io

import pytest
from rich.console import Console

from narrowgauge.trainer.runs.monitor.progress import Display


@pytest.mark.parametrize(
    ("every", "seconds", "shown"),
    [
        (100, 4.0, ["4/12", "7/12", "10/12", "12/12"]),  # a pipe is never silent for over 10 seconds
        (5, 0.1, ["5/12", "10/12", "12/12"]),
    ],
)
def test_lines_come_by_steps_or_by_seconds_with_the_median_speed(every, seconds, shown):
    """A slow step is not the speed: gauges read the fifth, which takes many times as long."""
    now, said = [0.0], io.StringIO()
    display = Display(Console(file=said, width=200), steps=12, every=every, clock=lambda: now[0])
    for step in range(1, 13):
        now[0] += seconds
        display.step({"step": step, "loss": 2.0, "tokens_per_s": 250.0 if step % 5 == 0 else 2000.0 + step})
    lines = [line.split() for line in said.getvalue().splitlines()]
    assert [line[1] for line in lines] == shown
    assert lines[-2][4] == ("2,008" if every == 100 else "2,007")
    assert ("left 0:00:08" in said.getvalue()) == (seconds == 4.0)
