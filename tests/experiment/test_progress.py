"""Lines of a ladder at work in a pipe, by a clock of the test."""

import io

from rich.console import Console

from narrowgauge.trainer.experiment.engine import ProgressLine
from narrowgauge.trainer.experiment.jobs import Job


def test_a_pipe_hears_of_runs_at_work(tmp_path):
    seconds, said = [0.0], io.StringIO()
    table = ProgressLine(Console(file=said, width=200), 9000, runs=4, done=1, clock=lambda: seconds[0])
    job = Job("mxfp4-seed-1", (), tmp_path / "mxfp4-seed-1", tokens=3000)
    for _ in range(30):
        seconds[0] += 4.0
        table.show([job], None)
    lines = said.getvalue().splitlines()
    assert lines == ["1/4  9.00 k tokens left; mxfp4-seed-1 starts"] * 3
