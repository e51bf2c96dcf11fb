"""Plain lines of progress, by a clock of the test."""

import io

from rich.console import Console

from narrowgauge.runs.monitor.progress import Display


def test_a_pipe_is_never_silent_for_long():
    """Steps of 4 seconds and a line each 100 steps: one comes after 10 seconds all the same."""
    seconds, said = [0.0], io.StringIO()
    display = Display(Console(file=said, width=200), steps=12, every=100, clock=lambda: seconds[0])
    for step in range(1, 13):
        seconds[0] += 4.0
        display.step({"step": step, "loss": 2.0, "tokens_per_s": 1000.0})
    shown = [int(line.split()[1].partition("/")[0]) for line in said.getvalue().splitlines()]
    assert shown == [4, 7, 10, 12]
    assert "left 0:00:08" in said.getvalue()


def test_quick_steps_print_by_their_number():
    seconds, said = [0.0], io.StringIO()
    display = Display(Console(file=said, width=200), steps=12, every=5, clock=lambda: seconds[0])
    for step in range(1, 13):
        seconds[0] += 0.1
        display.step({"step": step, "loss": 2.0, "tokens_per_s": 1000.0})
    assert [line.split()[1] for line in said.getvalue().splitlines()] == ["5/12", "10/12", "12/12"]


def test_a_slow_step_is_not_the_speed():
    """Gauges read the last step, which takes four times as long: the line gives the median since the last."""
    said = io.StringIO()
    display = Display(Console(file=said, width=200), steps=10, every=5)
    for step in range(1, 11):
        display.step(
            {"step": step, "loss": 2.0, "tokens_per_s": {5: 250.0, 10: 500.0}.get(step, 2000.0 + step)}
        )
    assert [line.split()[4] for line in said.getvalue().splitlines()] == ["2,002", "2,007"]
