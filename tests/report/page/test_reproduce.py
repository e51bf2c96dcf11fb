"""The script on a page that trains its runs again."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.trainer.report import read_run, render_report
from narrowgauge.trainer.report.page.reproduce import script


def scripts(page):
    """The scripts that a page shows, as a reader copies them."""
    return [html.unescape(text) for text in re.findall(r'<pre class="script">\n(.*?)</pre>', page, re.S)]


def test_it_names_versions_and_data_and_holds_each_configuration(make_run):
    text = script([read_run(make_run("bf16", recipe="bf16")), read_run(make_run("fp8"))])
    assert "# Trained with narrowgauge ?, torch 2.13.0." in text
    assert text.count("# Data: corpus") == 1
    assert text.count("lr = 0.0006") == 2
    assert "narrowgauge train reproduced/fp8.toml --out reproduced/fp8\n" in text
    assert "narrowgauge report reproduced/bf16 reproduced/fp8 --out reproduced/report.html" in text


def test_a_recipe_of_ones_own_is_written_as_the_run_began_with_it(make_run):
    run = make_run("mine", recipe="/elsewhere/mine.toml")
    raised = "\n# Raised by the guard; a resume takes it from the checkpoint\n\n[[rule]]\n"
    (run / "recipe.toml").write_text('name = "mine"\nEND\n' + raised)
    text = script([read_run(run)])
    assert "cat > reproduced/mine.recipe.toml <<'END_'\nname = \"mine\"\nEND\nEND_\n" in text
    assert 'name = "reproduced/mine.recipe.toml"' in text
    assert "/elsewhere" not in text
    (run / "recipe.toml").write_text(f'name = "mine"\n# {"x" * 20_000}\n')
    text = script([read_run(run)])
    assert "xxx" not in text
    assert "test -f reproduced/mine.recipe.toml || { echo 'copy recipe.toml of the run mine" in text


def test_a_run_that_began_otherwise_says_so(make_run):
    run = make_run("fp8")
    (run / "recipe.toml").write_text('name = "fp8"\n')
    make_run.append(run, '{"event": "branch", "step": 3, "reason": "from runs/a\\nrm -rf /"}\n')
    make_run.append(run, '{"event": "resume", "step": 3, "processes": 4}\n')
    text = script([read_run(run)])
    assert "# fp8 did not start from scratch (from runs/a rm -rf /), and this does." in text
    assert "torchrun --standalone --nproc-per-node 4 -m narrowgauge train" in text
    assert "recipe.toml" not in text, "a shipped recipe is named"


def test_names_are_quoted_for_the_shell(make_run):
    run = make_run("a;touch x,$(touch y) 'q'")
    text = script([read_run(run)])
    assert subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    commands = [line for line in text.splitlines() if "touch" in line and not line.startswith("#")]
    assert all("'reproduced/a;touch x,$(touch y) '\"'\"'q'\"'\"" in line for line in commands)
    (run / "config.toml").unlink()
    assert script([read_run(run)]) == "", "without a configuration there is no script"
    assert scripts(render_report([read_run(run)])) == []


@pytest.mark.tier("thorough")  # the tests above read the script
def test_the_script_of_a_page_trains_the_same_digits(narrowgauge, line, look, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\ntitle = "t"\nsource = "s"\ncompute = "bf16"\nfprop = "mxfp4"\n')
    changes = {"recipe.name": str(recipe), "training.steps": 3}
    first = tmp_path / "first"
    assert narrowgauge(*line(changes), "--out", first).code == 0
    (text,) = scripts((first / "report.html").read_text())
    recipe.unlink()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "narrowgauge"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m narrowgauge "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh"], input=text, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert look(tmp_path / "reproduced" / "first").column("loss") == look(first).column("loss")
    assert Path(tmp_path / "reproduced" / "first" / "report.html").exists()
    assert json.loads((tmp_path / "reproduced" / "first" / "status.json").read_text())["status"] == "done"
