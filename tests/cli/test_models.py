"""export, import, and sample and eval of what came out: as a user meets them."""

import contextlib
import io
import re

import pytest

from narrowgauge.trainer.cli.main import main

SHORT = ("--sequence-length", "32", "--batches", "2")


def printed(*words):
    """What a line prints that succeeds without a warning."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(list(map(str, words))) == 0
    assert err.getvalue() == ""
    return out.getvalue()


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "hf"
    first, remark = printed("export", finished, "--to", "hf", "--out", out).splitlines()
    assert first == f"{out}: {finished} after step 6, as hf"
    assert remark.startswith("weights are stored as they are before the recipe's casts")
    return out


@pytest.fixture(scope="module")
def imported(exported, text):
    run = exported.parent / "run"
    said = printed("import", exported, "--out", run, "--data", text)
    assert said.startswith(f"run directory: {run}\nthe weights were stored in fp32 (hf) and are kept in")
    assert f"--model.weights {run}" in said
    return run


def test_run_folder_and_import_are_one_model(command, exported, imported, text):
    said = [command("eval", p, "--data", text, *SHORT) for p in (imported, exported)]
    losses = [re.search(r"validation loss ([\d.]+)", ended.out)[1] for ended in said]
    assert losses[0] == losses[1]
    ended = command("eval", imported)  # on its own text, which is too short for its own windows
    assert (ended.code, "needs 1025" in ended.err) == (2, True)
    line = ("--prompt", "narrow", "--tokens", "8", "--temperature", "0")
    said = [command("sample", path, *line) for path in (imported, exported)]
    assert said[0] == said[1]
    assert said[0].out.startswith("narrow")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("point", ["filled", "renamed"])
@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_kill_leaves_all_or_nothing(narrowgauge, finished, exported, tmp_path, verb, point):
    line = [verb, finished, "--to", "hf"] if verb == "export" else [verb, exported]
    ended = narrowgauge(*line, "--out", tmp_path / "out", NARROWGAUGE_CRASH_AT=f"exchange:{point}")
    assert ended.code in (137, -9)
    assert (tmp_path / "out").exists() == (point == "renamed")
    if point == "filled":
        assert narrowgauge(*line, "--out", tmp_path / "out").code == 0
    assert printed("sample", tmp_path / "out", "--prompt", "a", "--tokens", "2")
