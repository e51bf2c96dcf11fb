"""The verbs of the command: the help line, function and requirements of each."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

Action = Callable[[argparse.Namespace], int | None]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the command.

    Attributes:
        line: Its help line.
        action: Its function, as `module:name` below `narrowgauge.cli.verbs`.
        has_torch: Whether every use of the verb computes with torch; `recipes` does only for questions about
            this machine.
        has_posix: Whether it needs the file locks and signals of POSIX.
    """

    line: str
    action: str
    has_torch: bool = True
    has_posix: bool = True

    def load(self) -> Action:
        """Import the function of the verb."""
        module, _, name = self.action.partition(":")
        action: Action = getattr(import_module(f"narrowgauge.cli.verbs.{module}"), name)
        return action


VERBS: Mapping[str, Verb] = {
    "train": Verb("train a model; the same line again continues a run that stopped", "train:run_train"),
    "compare": Verb(
        "train the same model under several recipes, settings and seeds, side by side", "compare:run"
    ),
    "plan": Verb(
        "what a run will take, before it is started: memory by class, traffic, time, cost", "machine:run_plan"
    ),
    "bench": Verb("how fast a step is, against this machine's ceilings and beside plain torch", "bench:run"),
    "doctor": Verb(
        "what is wrong with this machine, and how to fix it; exit code 1 if something is missing",
        "doctor:run",
        has_torch=False,
        has_posix=False,
    ),
    "scaling": Verb(
        "measure the same training on 1..N processes: speed-up, efficiency, communication",
        "machine:run_scaling",
    ),
    "convert": Verb("a run's newest state under another recipe, in a new run directory", "train:run_convert"),
    "prepare": Verb("turn documents into token files", "prepare:run"),
    "sample": Verb("text from a run, or from a model of another program", "models:sample"),
    "eval": Verb("losses and scores of a run, or of a model of another program", "models:evaluate"),
    "export": Verb("a run's model for other programs", "models:export"),
    "import": Verb("a model of another program as a run", "models:import_"),
    "probe": Verb("what recipes do to a model's loss and gradient, without training", "analysis:run_probe"),
    "sensitivity": Verb(
        "what narrowing each layer and place alone would cost a model", "analysis:run_sensitivity"
    ),
    "search": Verb(
        "the recipe that costs a model least, with a share of its FLOPs in 4 bits", "analysis:run_search"
    ),
    "predict": Verb(
        "what a recipe will cost in loss at a size and a length, from published runs",
        "predict:run",
        has_torch=False,
        has_posix=False,
    ),
    "advise": Verb("the line that trains a model best on a machine, and why others lost", "advise:run"),
    "launch": Verb("write the script that starts a run on a cluster", "launch:run"),
    "report": Verb("(re)make the HTML report of one run or several", "runs:run_report", has_torch=False),
    "recipes": Verb(
        "the recipes that ship, or the TOML of one; with --device, what another device multiplies",
        "recipes:run_recipes",
        has_torch=False,
        has_posix=False,
    ),
    "formats": Verb(
        "the number formats, or the facts of one", "recipes:run_formats", has_torch=False, has_posix=False
    ),
    "models": Verb(
        "the named sizes with their parameters", "recipes:run_models", has_torch=False, has_posix=False
    ),
    "runs": Verb(
        "the run directories of a folder, with state and loss",
        "runs:run_runs",
        has_torch=False,
        has_posix=False,
    ),
    "completion": Verb(
        "a script that completes verbs, options and names in bash, zsh or fish",
        "completion:run",
        has_torch=False,
        has_posix=False,
    ),
}
#: The verbs by what they are for, in the order of the help; a verb in no group stands under "more".
GROUPS: Mapping[str, tuple[str, ...]] = {
    "plan": ("advise", "plan", "predict", "doctor"),
    "data and models": ("prepare", "import", "export", "convert", "sample", "eval"),
    "train": ("train", "compare", "launch"),
    "look": ("report", "runs", "probe", "sensitivity", "search"),
    "measure this machine": ("bench", "scaling"),
    "what exists": ("recipes", "formats", "models", "completion"),
}


def grouped() -> dict[str, list[str]]:
    """Every verb, by group."""
    found = {group: [verb for verb in names if verb in VERBS] for group, names in GROUPS.items()}
    others = [verb for verb in VERBS if not any(verb in names for names in GROUPS.values())]
    return found | ({"more": others} if others else {})


#: Verbs of other programs, and what to write instead.
OTHER_VERBS = {
    **dict.fromkeys(("help", "man", "usage"), "--help"),
    "version": "--version",
    **dict.fromkeys(("run", "start", "pretrain", "pre-train", "fit", "resume", "continue"), "train"),
    **dict.fromkeys(("generate", "chat", "infer", "inference", "complete"), "sample"),
    **dict.fromkeys(("evaluate", "test", "validate", "score"), "eval"),
    **dict.fromkeys(("tokenize", "preprocess", "data"), "prepare"),
    **dict.fromkeys(("list", "ls", "status"), "runs"),
    **dict.fromkeys(("benchmark", "profile"), "bench"),
    **dict.fromkeys(("check", "env", "info"), "doctor"),
    **dict.fromkeys(("estimate", "dry-run"), "plan"),
    **dict.fromkeys(("forecast", "extrapolate"), "predict"),
    "quantize": "convert RUN --recipe R --out DIR",
}
