"""A comparison trains each recipe in a separate process, and behaves like one run; so does a ladder."""

import csv
import re
import signal
import tomllib

import pytest

from support.processes import TORCHRUN

ARMS = """
[arms.bf16]
recipe.name = "bf16"
[arms.mxfp8-e5m2]
recipe.name = "mxfp8"
recipe.dgrad = { dy = "mxfp8-e5m2" }
[experiment]
rungs = [10, 20]
seeds = [1]
jobs = 2
held_out_tokens = 64
"""
LADDER = {"model.dim": 64, "schedule.kind": "wsd", "checkpoint.every": 2, "recipe.name": "bf16"}


@pytest.fixture
def compare(line, tmp_path):
    """The words of a comparison into `tmp_path / "both"`."""

    def words(recipes, changes=None):
        options = line(changes)[1:]
        at = options.index("--recipe.name")
        named = ["--recipes", recipes] if recipes is not None else []
        return ["compare", *named, *options[:at], *options[at + 2 :], "--out", tmp_path / "both"]

    return words


@pytest.fixture
def ladder(line, tmp_path):
    """The words of a ladder into a directory."""
    file = tmp_path / "ladder.toml"
    file.write_text(ARMS)
    return lambda n: ["compare", file, *line(LADDER)[1:], "--gauges.every", "0", "--out", tmp_path / n]


def table_of(ended):
    assert ended.code == 0, ended.err
    return ended.out[ended.out.rindex("\nrun  ") :]


def config_of(run):
    return tomllib.loads((run.path / "config.toml").read_text())


@pytest.mark.tier("thorough")
def test_a_comparison_the_same_line_again_and_a_seed_more(narrowgauge, compare, look, tmp_path):
    words = [*compare("bf16,mxfp8"), "--recipe.wgrad.x", "bf16"]
    ended = narrowgauge(*words)
    table, both = table_of(ended), tmp_path / "both"
    assert ended.err == ""
    runs = {name: look(both / name) for name in ("bf16", "mxfp8")}
    losses = [run.steps[-1]["val_loss"] for run in runs.values()]
    assert re.search(rf"^val loss +{losses[0]:.4f} +{losses[1]:.4f}$", table, re.MULTILINE), table
    assert re.search(r"^gap +reference +[+-]\d+\.\d\d %$", table, re.MULTILINE)
    assert {config_of(run)["recipe"]["wgrad.x"] for run in runs.values()} == {"bf16"}
    threads = [config_of(run)["training"]["threads"] for run in runs.values()]
    assert threads == [runs["bf16"].lines[0]["threads"]] * 2, "the last digits follow from it"
    assert runs["bf16"].lines[1]["val_loss"] != runs["mxfp8"].lines[1]["val_loss"], "other numbers"
    assert ended.out.count("report: ") == ended.out.count("arithmetic ") == 1, "the runs leave theirs out"

    metrics = [(run.path / "metrics.jsonl").read_bytes() for run in runs.values()]
    assert table_of(narrowgauge(*words)) == table
    more = narrowgauge(*words, "--seeds", "2")
    assert f"in {both}, not trained again: bf16 (done), mxfp8 (done);" in more.out
    assert [(run.path / "metrics.jsonl").read_bytes() for run in runs.values()] == metrics
    found = [losses[0], look(both / "bf16-seed-1").steps[-1]["val_loss"]]
    spread = f"{sum(found) / 2:.4f} ± {abs(found[0] - found[1]) / 2**0.5:.4f}"
    assert re.search(rf"^val loss +{spread} ", table_of(more), re.MULTILINE), more.out
    assert (both / "report.html").read_text().count('<tr class="seed">') == 4


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "Ctrl-C"])
def test_asked_to_stop_the_run_inside_saves(narrowgauge, compare, look, tmp_path, name):
    """SIGTERM and Ctrl-C reach each process, SIGUSR1 the first."""
    number = signal.SIGINT if name == "Ctrl-C" else signal.Signals[name]
    words = compare("bf16,fp8", {"training.steps": 100, "checkpoint.every": 1000})
    run = look(tmp_path / "both" / "bf16")
    process = narrowgauge.start(*words).until(run.has_step(3))
    for each in (process,) if name == "SIGUSR1" else (process.child, process):
        each.send(number)
    ended = process.wait()
    assert ended.code == 75, ended.err
    (stop,) = run.events("stop")
    sentence = f"stopped by {number.name} after step {stop['step']}; rerun the same command to resume"
    assert f"bf16: narrowgauge: {sentence}\n" in ended.out
    assert run.status["status"] == "preempted"
    assert not (tmp_path / "both" / "fp8").exists()
    assert "It was stopped after step" in (tmp_path / "both" / "report.html").read_text()


@pytest.mark.tier("thorough")
def test_the_same_line_continues_a_comparison_that_stopped_or_was_killed(
    narrowgauge, compare, look, tmp_path, refused
):
    words = compare("bf16,fp8", {"training.steps": 100, "checkpoint.every": 1000})
    bf16, fp8 = look(tmp_path / "both" / "bf16"), look(tmp_path / "both" / "fp8")
    process = narrowgauge.start(*words).until(bf16.has_step(1))
    process.child.send(signal.SIGKILL)
    refused(process.wait(), "the run 'bf16' was killed by SIGKILL; rerun the same command to resume", code=1)
    assert narrowgauge.start(*words).send_when(fp8.has_step(3), signal.SIGTERM).code == 75
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    assert "not trained again: bf16 (done);" in ended.out
    log = (tmp_path / "both" / "fp8.log").read_text()
    assert f"continuing {fp8.path} after step {fp8.events('stop')[0]['step']}\n" in log
    assert bf16.column("step") == fp8.column("step") == [*range(1, 101)]


@pytest.mark.tier("thorough")
def test_a_run_that_fails_is_a_result_and_the_others_go_on(narrowgauge, compare, look, tmp_path):
    variants = ("hot:optimizer.lr=1e30,guard.max_skips=0", "cold:recipe=fp8,recipe.wgrad.x=bf16,lr=1e-4")
    words = [*compare(None, {"training.steps": 2}), *(w for v in variants for w in ("--variant", v))]
    ended = narrowgauge(*words)
    assert ended.code == 1, ended.err
    assert "1 of 2 runs failed: hot\n" in ended.out, "it diverged, and would again"
    hot, cold = look(tmp_path / "both" / "hot"), look(tmp_path / "both" / "cold")
    assert (hot.status["status"], cold.status["status"]) == ("failed", "done")
    assert max(cold.column("lr")) == 1e-4
    assert config_of(cold)["recipe"]["wgrad.x"] == "bf16"
    assert "hot failed after step" in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    # Side by side, it is a row, and fails a gate.
    beside = [*words[:-5], tmp_path / "beside", *words[-4:], "--jobs", "2"]
    ended = narrowgauge(*beside)
    assert ended.code == 0, ended.err
    assert re.search(r"^hot: narrowgauge: 1 steps in a row had a non-finite loss", ended.out, re.M)
    rows = csv.DictReader((tmp_path / "beside" / "runs.csv").read_text().splitlines())
    assert {(row["arm"], row["status"]) for row in rows} == {("cold", "done"), ("hot", "diverged")}


@pytest.mark.parametrize(
    ("recipes", "more", "says"),
    [
        ("", [], ["'fp8' is one run", "at least two"]),
        ("bf16,fp8,bf16", [], ["two runs would be called 'bf16'"]),
        ("bf16,mxpf8", [], ["unknown recipe 'mxpf8'", "'mxfp8'"]),
        ("bf16,fp8", ["--data.source", "/nope"], ["data source", "/nope"]),
        # A vocabulary is checked before a run is started or a step is timed.
        ("bf16,fp8", ["--variant", "small:model.vocab_size=256"], ["up to 256", "--model.vocab_size 257"]),
        (
            "bf16,fp8",
            ["--data.tokenizer", "bpe-300", "--dry-run"],
            ["tokenizer 'bpe-300' has token ids", "beyond model.vocab_size = 257"],
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_once(command, compare, refused, tmp_path, recipes, more, says):
    refused(command(*compare(recipes), *more), *says)
    assert not (tmp_path / "both").exists()
    if recipes == "":
        (tmp_path / "both").touch()
        refused(command(*compare("bf16,fp8")), tmp_path / "both", "cannot be written")


@pytest.mark.tier("thorough")
def test_two_processes_train_every_run_together(narrowgauge, compare, look, tmp_path):
    options = ["--standalone", "--nproc-per-node", "2", "-m", "narrowgauge"]
    ended = narrowgauge(*options, *compare("bf16,fp8", {"training.steps": 4}), script=TORCHRUN)
    assert ended.code == 0, ended.err
    for name in ("bf16", "fp8"):
        run = look(tmp_path / "both" / name)
        assert run.column("step") == [1, 2, 3, 4]
        assert run.events("start")[0]["processes"] == 2
    assert ended.out.count(f"report: {tmp_path / 'both' / 'report.html'}\n") == 1
    files = ["bf16", "bf16.log", "bf16.toml", "comparison.json", "fp8", "fp8.log", "fp8.toml", "report.html"]
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == files


@pytest.mark.tier("thorough")  # experiment/ and runs/use/test_branch.py prove its parts in this process
def test_a_ladder_is_the_same_after_a_kill(narrowgauge, ladder, look, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = narrowgauge(*ladder("whole"))
    assert ended.code == 0, ended.err
    assert "One seed proves no gap" in ended.out
    rows = list(csv.DictReader((whole / "runs.csv").read_text().splitlines()))
    arms = [(arm, rung, "done") for arm in ("bf16", "mxfp8-e5m2") for rung in "12"]
    assert [(row["arm"], row["rung"], row["status"]) for row in rows] == arms
    assert rows[0]["own_loss"] == rows[0]["bf16_loss"]
    assert rows[2]["own_loss"] != rows[2]["bf16_loss"]
    assert rows[3]["own_loss"] == f"{look(whole / 'mxfp8-e5m2-seed-1').steps[-1]['val_loss']:.6f}"
    assert len(look(whole / "bf16,steps=10-seed-1").events("branch")) == 1
    assert "<svg" in (whole / "report.html").read_text()

    process = narrowgauge.start(*ladder("killed"), forks=False)
    assert process.send_when(look(killed / "bf16-seed-1").has_step(4), signal.SIGKILL).code != 0
    again = narrowgauge(*ladder("killed"))
    assert again.code == 0, again.err
    other = narrowgauge(*ladder("killed"), "--optimizer.lr", "0.5")
    assert other.code == 2
    assert "optimizer.lr = 0.002, and now it is 0.5" in other.err
    assert (killed / "runs.csv").read_bytes() == (whole / "runs.csv").read_bytes()


def test_a_plan_is_said_and_nothing_is_trained(command, ladder, tmp_path):
    ended = command(*ladder("planned"), "--dry-run")
    assert ended.code == 0, ended.err
    assert "One seed proves no gap" in ended.out
    assert "2 runs, 0 done" in ended.out
    assert "1 of 2: at most 3 steps" in ended.out  # each measurement is announced
    assert re.search(r"[1-9][\d.]* (min|s)\b.* of 1 thread\(s\)", ended.out)  # not "0.0 hours"
    assert not (tmp_path / "planned").exists()
