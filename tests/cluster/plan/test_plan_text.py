"""A plan as text: no row of nothing, no power of ten, durations in their own units, each interval once."""

import json
import re
import shlex

import pytest

from narrowgauge.trainer.simulate import ALONE, Room, estimate_memory
from narrowgauge.trainer.training import make_config

SMALL = "--model gpt2-124m --model.layers 2 --data.sequence_length 128 --training.micro_batch_size 4"


@pytest.mark.tier("thorough")
def test_a_short_run_on_a_fast_machine_is_readable(narrowgauge):
    words = ["--cluster", "rtx4090", "--recipe", "fp8", "--steps", "1", "--training.batch_size", "4"]
    shown = narrowgauge("plan", *SMALL.split(), *words)
    assert shown.code == 0, shown.err
    assert not re.search(r"\b0 bytes|\b0\.0 MiB|\de-\d|\bdays\b|\b(\d+) to \1\b", shown.out), shown.out
    assert not re.search(r"^ (master|whole weights) ", shown.out, re.MULTILINE)
    assert re.search(r"^ 512 tokens +[\d.]+ s +[\d.]+ s", shown.out, re.MULTILINE)
    assert re.search(r"^ cost +below 0\.01 USD +below 0\.01 USD", shown.out, re.MULTILINE)


@pytest.mark.tier("thorough")
def test_the_line_that_fits_is_printed_and_fits(narrowgauge):
    """All settings do not make fp8 fit, so the recipe changes as well; what was given stays where it can."""
    least = {"micro_batch_size": 1, "batch_size": 4, "recompute": True, "chunked_loss": True}
    narrow = {"name": "msamp-o3", "offload": "master,grad,m,v"}
    data, model = {"sequence_length": 128}, {"name": "gpt2-124m", "layers": 4, "vocab_size": 256}
    smallest = make_config({"model": model, "data": data, "training": least, "recipe": narrow})
    memory = estimate_memory(smallest)
    limit = Room(0, "", has_host=True, copies_saves=False).needed(memory, ALONE)
    words = [*SMALL.split(), "--model.layers", "4", "--model.vocab_size", "256", "--training.batch_size", "4"]
    words += ["--recipe", "fp8", "--memory-limit", f"{limit}B"]
    shown = narrowgauge("plan", *words)
    assert "does not fit: " in shown.out, shown.err
    fitting = r"^it fits with these changes, .*:\n  (narrowgauge plan .*)$"
    (line,) = re.findall(fitting, shown.out, re.MULTILINE)
    given = shlex.split(line)
    assert given.count("--recipe") == given.count("--training.micro_batch_size") == 1
    assert given[given.index("--recipe") + 1] == "msamp-o3"
    again = narrowgauge(*given[1:])
    assert re.search("^fits: ", again.out, re.MULTILINE), again.out
    assert "it fits with these changes" not in again.out
    assert json.loads(narrowgauge("plan", *words, "--json").out)["fits_with"]["peak"] <= memory.peak
