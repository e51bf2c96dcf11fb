"""Every command line of the README and of docs/ can start.

A line of `narrowgauge` is read as the command reads it, and laid out over the processes that it speaks of, up
to the point where it would begin to work; `launch`, `recipes` and `formats` do theirs. Of other programs, the
options, targets and files exist. `test_readme` runs the lines of some pages to their ends.
"""

import itertools
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.line import config_values, read_line
from narrowgauge.trainer.cli.main import run_verb
from narrowgauge.trainer.cluster.scaling.scaling import _plans, read_sizes
from narrowgauge.trainer.laboratory.compare import experiment_of
from narrowgauge.trainer.runs import default_out, lay_out
from narrowgauge.trainer.training import make_config
from support.markdown import blocks, shell_lines, titled
from support.other_tools import write_files

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "which-format.ipynb"
NAMES = ["README.md", "CONTRIBUTING.md", "conformance/README.md"]
NAMES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
PAGES["the notebook"] = "".join(f"```sh\n{c.removeprefix('%%sh')}\n```\n" for c in CELLS if c[:5] == "%%sh\n")
# What a reader brings along, and what a checkout would hold if the reader did what the page proposes.
OF_THE_READER = re.compile(r"my\.toml|\./mxfp8-e3m4\.toml|smollm2-135m|e3m4")
STARTERS = ("narrowgauge", "torchrun", "python", "pip", "make", "pytest", "tensorboard")
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
OTHERS = {"cd", "curl", "docker", "done", "for", "git", "mkdir", "pipx", "uv", ".venv/bin/pre-commit"}


def lines_of(text: str) -> list[list[str]]:
    """The words of each command line: of `sh` blocks, of `text` blocks that show some, and in `code`."""
    shown = [line for block in blocks(text, "text") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    in_code = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)
    shown += [line for line in in_code if not re.fullmatch(r"narrowgauge \w+", line)]  # more than a verb
    starts = tuple(f"{word} " for word in STARTERS)
    words = [shlex.split(line, comments=True) for line in shown if line.startswith(starts)]
    return [*shell_lines(text), *(line for line in words if not any(w.isupper() or w == "..." for w in line))]


def processes_of(words: list[str]) -> int:
    """How many processes a line starts; the options of torchrun are read as torchrun reads them."""
    if "torchrun" not in words:
        return 1
    read = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    return int(read.nproc_per_node)


def check(words: list[str], processes: int = 1) -> list[Path]:
    """Read a line of `narrowgauge`, and lay it out; the run directories that it would make."""
    words = list(itertools.takewhile(lambda word: word not in ("|", ">"), words))
    if words == ["--help"]:
        return []
    if "--help" in words:
        with pytest.raises(SystemExit):
            read_line(words)
        return []
    options, verb = read_line(words), words[0]
    if verb in ("launch", "recipes", "formats"):
        run_verb(options)
        return []
    if not hasattr(options, "config"):
        made = verb == "import" and options.out
        return [options.out] if made else []
    if options.config and not options.config.exists():
        options.config.touch()  # a reader's own, and the page does not show it
    if verb == "compare":
        vars(options).pop("model.weights", "")  # of a run that is not here
        o, values = options, config_values(options)
        runs = experiment_of(values, o.recipes, o.variants, o.seeds, o.arms, o.rungs, o.jobs).runs
        for run in runs:
            lay_out(run.config, processes)
        out = options.out or Path("runs") / f"compare-{runs[0].config.model.name}"
        return [out, *(out / run.name for run in runs)]
    values = config_values(options)
    values.get("model", {}).pop("weights", "")  # of a run that is not here
    config = make_config(values)
    if verb == "scaling":
        for size in read_sizes(options.procs):
            assert _plans(config, size)
        return []
    lay_out(config, int(getattr(options, "devices", processes)))
    return [options.out or default_out(config)] if verb == "train" else []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout's experiments, where a reader would paste the lines."""
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_narrowgauge_can_start(page, folder, capsys):
    for name, text in titled(PAGES[page]).items():
        (folder / name).write_text(text, encoding="utf-8")
    made = {Path("runs/debug-stdlib-fp8")}  # `make train`
    if page == "the notebook":  # runs of `ng.train` in other cells
        made.update(map(Path, re.findall(r'\\"(runs/[\w-]+)\\"', NOTEBOOK.read_text(encoding="utf-8"))))
    for words in lines_of(PAGES[page]):
        line = shlex.join(words)
        if "narrowgauge" not in words or OF_THE_READER.search(line):
            continue
        ours = words[words.index("narrowgauge") + 1 :]
        try:
            made.update(check(ours, processes_of(words)))
        except UserError as error:
            pytest.fail(f"{page}: {line}: {error}")
        needed = [] if ours[:1] == ["train"] else re.findall(r"(?<!--out )\bruns/[\w./-]+", line)
        assert {run for run in map(Path, needed) if run.suffix != ".html"} <= made, f"{page}: {line}"


def test_the_tasks_of_an_editor_can_start(folder):
    """`launch.json`: the module and its arguments."""
    (block,) = blocks(PAGES["docs/how-to/troubleshooting.md"], "json")
    tasks = json.loads(block)["configurations"]
    for task in tasks:
        words = task["args"] if task["module"] == "narrowgauge" else ["torchrun", *task["args"]]
        ours = words[words.index("narrowgauge") + 1 :] if words[0] == "torchrun" else words
        assert check(ours, processes_of(words))
    assert [task["module"] for task in tasks] == ["torch.distributed.run", "narrowgauge"]


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_other_programs_name_what_exists(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in lines_of(PAGES[page]):
        while "=" in words[0]:  # variables
            words = words[1:]
        line = shlex.join(words)
        if words[:4] == ["python", "-m", "pip", "install"] or words[:2] == ["pip", "install"]:
            assert "narrowgauge" not in line.replace("dist/narrowgauge", ""), "no registry has it yet"
            assert {*",".join(re.findall(r"\[(.*?)\]", line)).split(",")} - {""} <= {*extras}
        elif words[0] == "make":
            assert words[1].partition("=")[0] in TARGETS, line
        elif words[:3] == ["python", "-m", "narrowgauge.conformance"]:
            assert words[3:4] in ([], ["mine.py"]) or (ROOT / words[3]).exists(), line
        elif words[:2] == ["python", "-m"]:
            assert words[2] in ("build", "venv", "pip"), line
        elif words[0] == "python":
            source, options = (ROOT / words[1]).read_text(), [w for w in words[2:] if w.startswith("--")]
            assert all(f'"{option.partition("=")[0]}"' in source for option in options), line
        elif words[0] == "pytest":
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), line
        elif words[0] not in ("narrowgauge", "torchrun", "tensorboard"):
            assert words[0] in OTHERS, line
