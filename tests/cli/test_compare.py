"""A comparison trains each recipe in a separate process, and behaves like one run."""

import json
import re
import signal
import tomllib

import pytest

from support.processes import TORCHRUN


@pytest.fixture
def compare(line, tmp_path):
    """The words of a comparison into `tmp_path / "both"`."""

    def words(recipes, changes=None):
        options = line(changes)[1:]
        at = options.index("--recipe.name")
        return [
            "compare",
            "--recipes",
            recipes,
            *options[:at],
            *options[at + 2 :],
            "--out",
            tmp_path / "both",
        ]

    return words


@pytest.mark.tier("thorough")
def test_a_comparison_and_the_same_line_again(narrowgauge, compare, look, tmp_path):
    words = [*compare("bf16,mxfp8"), "--recipe.wgrad.x", "bf16"]
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    both = tmp_path / "both"
    runs = {name: look(both / name) for name in ("bf16", "mxfp8")}
    table = ended.out[ended.out.rindex("\nrun  ") :]
    for row, values in {
        "run": runs,
        "arithmetic": ["native", "emulated"],
        "val loss": [f"{run.steps[-1]['val_loss']:.4f}" for run in runs.values()],
        "status": ["done", "done"],
    }.items():
        assert re.search(rf"^{row} +{' +'.join(values)}$", table, re.MULTILINE), table
    assert re.search(r"^gap +reference +[+-]\d+\.\d\d %$", table, re.MULTILINE)
    assert ended.out.endswith(f"report: {both / 'report.html'}\n")
    page = (both / "report.html").read_text()
    assert ">bf16<" in page
    assert ">mxfp8<" in page
    for name in runs:
        assert tomllib.loads((both / name / "config.toml").read_text())["recipe"]["wgrad.x"] == "bf16"
    threads = [
        tomllib.loads((both / name / "config.toml").read_text())["training"]["threads"] for name in runs
    ]
    assert threads == [runs["bf16"].lines[0]["threads"]] * 2, "the last digits follow from it"
    assert runs["bf16"].lines[1]["val_loss"] != runs["mxfp8"].lines[1]["val_loss"], "other numbers"

    metrics = [(run.path / "metrics.jsonl").read_bytes() for run in runs.values()]
    assert "sample, from" not in ended.out, "it is in each run's directory"
    assert all(run.events("done")[0]["sample"] for run in runs.values())
    assert ended.out.count("report: ") == ended.out.count("arithmetic ") == 1, "the runs leave theirs out"

    at = words.index("bf16,mxfp8")
    again = narrowgauge(*words[:at], "bf16", "--recipes", "mxfp8", *words[at + 1 :])
    assert again.code == 0, again.err
    assert again.out.count("is done; to train again") == 2
    assert again.out[again.out.rindex("\nrun  ") :] == table
    assert [(run.path / "metrics.jsonl").read_bytes() for run in runs.values()] == metrics


@pytest.mark.parametrize(
    ("number", "everywhere"),
    [
        pytest.param(signal.SIGUSR1, False, id="SIGUSR1"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM to each process", marks=pytest.mark.tier("thorough")),
        pytest.param(signal.SIGINT, True, id="Ctrl-C"),
    ],
)
def test_asked_to_stop_the_run_inside_saves(narrowgauge, compare, look, tmp_path, number, everywhere):
    words = compare("bf16,fp8", {"training.steps": 100, "checkpoint.every": 1000})
    run = look(tmp_path / "both" / "bf16")
    process = narrowgauge.start(*words).until(run.has_step(3))
    for each in (process.child, process) if everywhere else (process,):
        each.send(number)
    ended = process.wait()
    assert ended.code == 75, ended.err
    (stop,) = run.events("stop")
    sentence = f"stopped by {number.name} after step {stop['step']}; the same line continues"
    assert ended.err == f"narrowgauge: {sentence}\n"
    assert run.status["status"] == "preempted"
    assert not (tmp_path / "both" / "fp8").exists()
    assert "It was stopped after step" in (tmp_path / "both" / "report.html").read_text()


@pytest.mark.tier("thorough")
def test_the_same_line_continues_a_comparison_that_stopped(narrowgauge, compare, look, tmp_path):
    words = compare("bf16,fp8", {"training.steps": 100, "checkpoint.every": 1000})
    bf16, fp8 = look(tmp_path / "both" / "bf16"), look(tmp_path / "both" / "fp8")
    for run in (bf16, fp8):
        assert narrowgauge.start(*words).send_when(run.has_step(3), signal.SIGTERM).code == 75
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    assert f"{bf16.path} is done" in ended.out
    assert f"continuing {fp8.path} after step {fp8.events('stop')[0]['step']}\n" in ended.out
    assert bf16.column("step") == fp8.column("step") == [*range(1, 101)]


@pytest.mark.tier("thorough")
def test_a_run_that_was_killed_is_named(narrowgauge, compare, look, tmp_path, refused):
    run = look(tmp_path / "both" / "bf16")
    process = narrowgauge.start(*compare("bf16,fp8", {"training.steps": 10_000})).until(run.has_step(1))
    process.child.send(signal.SIGKILL)
    refused(process.wait(), "the run 'bf16' was killed by SIGKILL; the same line continues", code=1)


@pytest.mark.tier("thorough")
def test_a_run_that_fails_is_a_result_and_the_others_go_on(narrowgauge, compare, tmp_path):
    words = compare("bf16", {"training.steps": 2})
    words = words[: words.index("--recipes")] + words[words.index("--recipes") + 2 :]
    ended = narrowgauge(
        *words, "--variant", "hot:optimizer.lr=1e30,guard.max_skips=0", "--variant", "cold:optimizer.lr=1e-4"
    )
    assert ended.code == 1, ended.err
    assert "1 of 2 runs failed: hot\n" in ended.out, "it diverged, and would again"
    status = {
        name: json.loads((tmp_path / "both" / name / "status.json").read_text()) for name in ("hot", "cold")
    }
    assert (status["hot"]["status"], status["cold"]["status"]) == ("failed", "done")
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "hot failed after step" in page


@pytest.mark.parametrize(
    ("recipes", "words"),
    [
        ("", ["'fp8' is one run", "at least two"]),
        (",", ["at least two"]),
        ("bf16", ["'bf16' is one run", "at least two"]),
        ("bf16,fp8,bf16", ["two runs would be called 'bf16'"]),
        ("bf16,mxpf8", ["unknown recipe 'mxpf8'", "'mxfp8'"]),
    ],
)
def test_recipes_that_cannot_be_compared(narrowgauge, compare, refused, tmp_path, recipes, words):
    refused(narrowgauge(*compare(recipes)), *words)
    assert not (tmp_path / "both").exists()


def test_a_vocabulary_too_small_is_refused_before_a_run_is_started(narrowgauge, compare, refused, tmp_path):
    words = [*compare("bf16,fp8"), "--variant", "small:model.vocab_size=256"]
    refused(narrowgauge(*words), "token ids up to 256", "model.vocab_size = 256", "--model.vocab_size 257")
    assert not (tmp_path / "both").exists()


def test_a_vocabulary_that_the_text_decides_is_checked_before_a_step_is_timed(narrowgauge, compare, refused):
    words = [*compare("bf16,fp8"), "--data.tokenizer", "bpe-300", "--dry-run"]
    refused(narrowgauge(*words), "tokenizer 'bpe-300' has token ids", "beyond model.vocab_size = 257")


def test_what_every_recipe_would_refuse_is_said_once(narrowgauge, compare, refused, tmp_path):
    refused(
        narrowgauge(*compare("bf16,fp8", {"data.source": tmp_path / "no"})), "data source", tmp_path / "no"
    )
    (tmp_path / "both").touch()
    refused(narrowgauge(*compare("bf16,fp8")), tmp_path / "both", "cannot be written")


@pytest.mark.tier("thorough")
def test_seeds_that_come_later_find_the_runs_that_are_there(narrowgauge, compare, line, look, tmp_path):
    both = tmp_path / "both"
    assert narrowgauge(*line({"recipe.name": "bf16"}), "--out", both / "bf16").code == 0
    before = (both / "bf16" / "metrics.jsonl").read_bytes()
    ended = narrowgauge(*compare("bf16"), "--seeds", "2")
    assert ended.code == 0, ended.err
    assert ended.out.count("is done; to train again") == 1
    assert (both / "bf16" / "metrics.jsonl").read_bytes() == before
    runs = look(both / "bf16"), look(both / "bf16-seed-1")
    configs = [tomllib.loads((run.path / "config.toml").read_text()) for run in runs]
    assert [config["training"].pop("seed") for config in configs] == [0, 1]
    begun = runs[0].lines[0]["threads"]
    assert [config["training"].pop("threads") for config in configs] == [0, begun], "as the run that is there"
    assert configs[0] == configs[1]
    losses = [run.steps[-1]["val_loss"] for run in runs]
    assert losses[0] != losses[1]
    spread = f"{sum(losses) / 2:.4f} ± {abs(losses[0] - losses[1]) / 2**0.5:.4f}"
    table = ended.out[ended.out.rindex("\nrun  ") :]
    assert re.search(rf"^val loss +{spread}$", table, re.MULTILINE), table
    assert re.search(r"^seeds +2$", table, re.MULTILINE), table
    page = (both / "report.html").read_text()
    assert page.count('<tr class="seed">') == 2
    assert ">bf16-seed-1<" in page


@pytest.mark.tier("thorough")  # the README's lines compare
def test_variants_of_a_recipe_and_of_the_learning_rate(narrowgauge, compare, look, tmp_path):
    rates = {"slow": 0.001, "hot": 0.004}
    variants = [f"{name}:recipe=fp8,recipe.wgrad.x=bf16,lr={lr}" for name, lr in rates.items()]
    ended = narrowgauge(*compare(""), "--variant", variants[0], "--variant", variants[1])
    assert ended.code == 0, ended.err
    for name, lr in rates.items():
        run = look(tmp_path / "both" / name)
        assert run.status["status"] == "done"
        assert max(run.column("lr")) == lr
        assert tomllib.loads((run.path / "config.toml").read_text())["recipe"]["wgrad.x"] == "bf16"
    assert re.search(r"^verdict +reference +open$", ended.out, re.MULTILINE)
    assert "A gap of one seed has no confidence interval" in " ".join(ended.out.split())


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
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == [
        *("bf16", "bf16.toml", "comparison.json", "fp8", "fp8.toml", "report.html")
    ]
