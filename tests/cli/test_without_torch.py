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
from narrowgauge.trainer.cli.line import VERBS

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
    **dict.fromkeys(["--help", "--version", "train --help"]),
    **dict.fromkeys(["formats", "models llama3-1b", "recipes mxfp4 --diff nvfp4"], "recipes"),
    **dict.fromkeys(["recipes --device gfx942", "recipes fp8 --to te"], "recipes"),
    "runs .": "runs",
}


@pytest.mark.tier("thorough", keep=("formats",))
@pytest.mark.parametrize("asked", ANSWERED)
def test_what_exists_is_listed_without_torch_and_imports_its_verb_alone(without, asked):
    code, out, err = without("absent", *asked.split())
    assert (code, err) == (0, "")
    assert out
    modules = (without.root / "modules").read_text().split()
    verbs = {name.split(".")[4] for name in modules if name.startswith("narrowgauge.trainer.cli.verbs.")}
    if asked == "--help":
        assert all(f"    {verb} " in out for verb in VERBS)
    else:
        assert verbs == ({ANSWERED[asked]} if ANSWERED[asked] else set())
    if asked == "formats":
        assert not {"numpy", "pydantic", "narrowgauge.trainer.training.config.schema"} & set(modules)


@pytest.mark.tier("thorough")
def test_the_report_of_a_run_needs_no_torch(without, tmp_path, finished):
    assert without("absent", "report", str(finished), "--out", str(tmp_path / "page.html"))[::2] == (0, "")
    assert (tmp_path / "page.html").exists()


INSTALL = "torch is not installed; python -m pip install torch"
#: What lacks, a line, its exit code, and how its one sentence begins.
REFUSED = [
    # a mistake is answered before torch is imported
    ("absent", "trian", 2, "unknown verb 'trian'; the nearest is 'train' (known: advise, plan, "),
    ("absent", "train --stpes 5", 2, "unknown option '--stpes'; the nearest is '--steps'"),
    ("absent", "advise --model gtp2-124m --cluster rtx4090", 2, "argument --model: unknown model"),
    ("absent", "prepare /nope --out x", 2, "data source '/nope' does not exist: there is no '/nope'"),
    # a verb says why it cannot start, and what to do
    ("absent", "train --steps 1", 1, INSTALL),
    ("absent", "recipes", 1, "torch is not installed;"),  # its table has what is native on this machine
    ("old", "train --steps 1", 1, "torch 2.6.0 is too old; install torch 2.11 or later"),
    ("no-pydantic", "train --steps 1", 1, "the package pydantic is missing; python -m pip install pydantic"),
    ("no-pydantic", "train --help", 1, "the package pydantic is missing;"),
    ("no-rich", "doctor", 1, "the package rich is missing; python -m pip install rich; "),
]


@pytest.mark.tier("thorough", keep=("no-pydantic-train --help-1-the package pydantic is missing;",))
@pytest.mark.parametrize(("folder", "line", "code", "sentence"), REFUSED)
def test_what_cannot_be_is_one_sentence(without, folder, line, code, sentence):
    ended, out, err = without(folder, *line.split())
    helps = "usage: narrowgauge train ...\n\nTrain a model, or continue a run that stopped.\n"
    assert (ended, out) == (code, helps if "--help" in line else "")
    assert err.startswith(f"narrowgauge: {sentence}")
    assert err.count("\n") == 1
    assert ("'narrowgauge doctor' looks at the whole machine" in err) == (code == 1)
    if sentence == INSTALL:  # one process of a job says it
        job = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        assert without(folder, *line.split(), **job)[2] == ""


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
