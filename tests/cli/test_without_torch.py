"""The command where torch does not import, in separate processes: what it answers, why, and the fix.

A folder in front of all packages holds a torch that fails as real ones do, or a rule that there is none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.trainer.cli.table import VERBS

SOURCE = Path(ng.__file__).parents[1]
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
#: Besides blocking torch, the process writes the names of its modules when it exits.
TOLD = """
import atexit
atexit.register(lambda: open("modules", "w").write(" ".join(sys.modules)))
"""
FOLDERS = {
    "absent": {"sitecustomize.py": ABSENT.format(name="torch") + TOLD},
    "crash": {"torch/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"},
    "old": {
        "torch/__init__.py": "__version__ = '2.6.0'",
        "torch/version.py": "__version__ = '2.6.0+cu118'\ncuda = '11.8'\nhip = None\n",
        "torch-2.6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n",
    },
    "no-pydantic": {"sitecustomize.py": ABSENT.format(name="pydantic")},
    "no-rich": {"sitecustomize.py": ABSENT.format(name="rich")},
}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Runs the command with one of the folders in front: (exit code, output, errors)."""
    root = tmp_path_factory.mktemp("sites")
    for folder, files in FOLDERS.items():
        for name, text in files.items():
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (root / folder / name).write_text(text)

    def run(folder, *words, **more):
        places = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{root / folder}:{SOURCE}"} | more
        line = [sys.executable, "-m", "narrowgauge", *words]
        ended = subprocess.run(line, capture_output=True, text=True, cwd=root, env={**os.environ, **places})
        return ended.returncode, ended.stdout, ended.stderr

    run.root = root
    return run


#: Lines that are answered without torch, and the one module of verbs that they import.
ANSWERED = {
    **dict.fromkeys(["--help", "--version", ""], None),
    "train --help": None,
    **dict.fromkeys(["formats", "formats e4m3", "models llama3-1b", "recipes mxfp4"], "recipes"),
    **dict.fromkeys(["recipes mxfp4 --diff nvfp4", "recipes mxfp4 --device rtx4090"], "recipes"),
    **dict.fromkeys(["recipes fp8 --to te", "recipes --device gfx942"], "recipes"),
    "runs .": "runs",
}


@pytest.mark.tier("thorough", keep=("formats",))
@pytest.mark.parametrize("line", ANSWERED)
def test_what_exists_is_listed_without_torch_and_imports_its_verb_alone(without, line):
    code, out, err = without("absent", *line.split())
    assert (code, err) == (0, "")
    assert out
    modules = (without.root / "modules").read_text().split()
    verbs = {name.split(".")[4] for name in modules if name.startswith("narrowgauge.trainer.cli.verbs.")}
    if line in ("", "--help"):
        assert all(f"    {verb} " in out for verb in VERBS)
    else:
        assert verbs == ({ANSWERED[line]} if ANSWERED[line] else set())
    if line == "formats":
        assert not {"numpy", "pydantic", "narrowgauge.trainer.training.config.schema"} & set(modules)
    if line == "train --help":
        assert "Train a model, or continue a run that stopped.\n" in out
        assert "--recipe" in out


@pytest.mark.tier("thorough")
def test_the_report_of_a_run_needs_no_torch(without, tmp_path, finished):
    assert without("absent", "report", str(finished), "--out", str(tmp_path / "page.html"))[::2] == (0, "")
    assert (tmp_path / "page.html").exists()


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trian", "unknown verb 'trian'; the nearest is 'train' (known: advise, plan, "),
        ("--verison", "unknown option '--verison'; the nearest is '--version'\n"),
        ("train --stpes 5", "unknown option '--stpes'; the nearest is '--steps'"),
        ("advise --model gpt2-124m --cluster 40900", "unknown cluster '40900'; the nearest is 'rtx4090'"),
        ("advise --model gtp2-124m --cluster rtx4090", "unknown model 'gtp2-124m'"),
        ("train --data /nope", "data source '/nope' does not exist: there is no '/nope'"),
        ("eval run --data /nope", "data source '/nope' does not exist"),
        ("prepare /nope --out x", "data source '/nope' does not exist: there is no '/nope'"),
    ],
)
def test_a_mistake_is_answered_before_torch_is_imported(without, line, sentence):
    code, out, err = without("absent", *line.split())
    assert (code, out) == (2, "")
    assert err.startswith("narrowgauge: ")
    assert sentence in err
    assert err.count("\n") == 1


CANNOT_START = {
    "absent": ("torch is not installed", "python -m pip install torch"),
    "old": ("torch 2.6.0 is too old", "install torch 2.11 or later"),
    "no-pydantic": ("the package pydantic is missing", "python -m pip install pydantic"),
}


@pytest.mark.tier("thorough", keep=("no-pydantic",))
@pytest.mark.parametrize("folder", CANNOT_START)
def test_a_verb_says_why_it_cannot_start_and_what_to_do(without, folder):
    why, fix = CANNOT_START[folder]
    code, out, err = without(folder, "train", "--steps", "1")
    assert (code, out) == (1, "")
    assert err.startswith(f"narrowgauge: {why}; ")
    assert fix in err
    assert "'narrowgauge doctor' looks at the whole machine" in err
    assert err.count("\n") == 1
    if folder == "absent":  # the table lists what is native on this machine; one process of a job says it
        assert without("absent", "recipes")[2].startswith("narrowgauge: torch is not installed;")
        job = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        assert without("absent", "train", **job)[2] == ""
    if folder == "no-pydantic":  # the help of a verb is its line and the reason
        code, out, err = without(folder, "train", "--help")
        assert (code, err.split(";")[0]) == (1, "narrowgauge: the package pydantic is missing")
        assert out == "usage: narrowgauge train ...\n\nTrain a model, or continue a run that stopped.\n"


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("folder", "why", "fix"),
    [
        ("absent", "not installed", "python -m pip install torch"),
        ("crash", "it does not import: its process was killed by SIGILL", "choose a machine with AVX2"),
        ("old", "2.6.0+cu118, built for CUDA 11.8", "install torch 2.11 or later"),
    ],
)
def test_the_doctor_looks_at_the_rest_all_the_same(without, folder, why, fix):
    code, out, err = without(folder, "doctor", "--json", "--data", "a.txt", CXX="true")
    assert (code, err) == (1, "")
    items = {item["item"]: item for item in json.loads(out)}
    assert (items["torch"]["status"], items["torch"]["found"]) == ("MISS", why)
    assert fix in items["torch"]["fix"]
    assert items["data"]["fix"] == "fix torch and the packages first (see above)"
    assert {"system", "python", "packages", "driver", "gpus", "launcher", "disk", "network"} <= set(items)
    assert not {"recipes", "nccl"} & set(items)


@pytest.mark.tier("thorough")
def test_the_doctor_without_its_own_package(without):
    code, out, err = without("no-rich", "doctor")
    assert (code, out) == (1, "")
    assert err.startswith("narrowgauge: the package rich is missing; python -m pip install rich; ")
