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
    "train": Verb("train a model, or continue a run that stopped", "train:run_train"),
    "compare": Verb(
        "train a model under several recipes, settings and seeds, and compare the losses", "compare:run"
    ),
    "plan": Verb("estimate a run before it starts: memory by class, traffic, time, cost", "machine:run_plan"),
    "bench": Verb("time a step; compare it with the machine's ceilings and plain torch", "bench:run"),
    "doctor": Verb(
        "check this machine and say how to fix what is missing (then exit code 1)",
        "doctor:run",
        has_torch=False,
        has_posix=False,
    ),
    "scaling": Verb(
        "train on 1 to N processes: speed-up, efficiency, communication",
        "machine:run_scaling",
    ),
    "prepare": Verb("turn documents into token files", "prepare:run", has_torch=False),
    "sample": Verb("generate text with a run or a model of another program", "models:sample"),
    "eval": Verb("evaluate a run or a model of another program: losses and scores", "models:evaluate"),
    "export": Verb("write a run's model for other programs", "models:export"),
    "import": Verb("turn a model of another program into a run", "models:import_"),
    "served": Verb(
        "compare a run with itself behind a server; exit code 1 if they differ", "served:run_served"
    ),
    "probe": Verb(
        "measure the effect of recipes on loss and gradient, without training", "analysis:run_probe"
    ),
    "sensitivity": Verb(
        "measure the cost of low precision in each layer and place separately", "analysis:run_sensitivity"
    ),
    "search": Verb(
        "find the cheapest recipe for a model, with a share of its FLOPs in 4 bits", "analysis:run_search"
    ),
    "predict": Verb(
        "forecast a recipe's loss gap at a size and length, from published runs",
        "predict:run",
        has_torch=False,
        has_posix=False,
    ),
    "advise": Verb("find the best recipe, layout and settings for a machine and a budget", "advise:run"),
    "launch": Verb("write a script that starts a run on a cluster", "launch:run"),
    "report": Verb("write the HTML report of one or more runs", "runs:run_report", has_torch=False),
    "watch": Verb("show runs and comparisons on a live page", "runs:run_watch", has_torch=False),
    "recipes": Verb(
        "list the shipped recipes, or print one; with --device, what is native on another device",
        "recipes:run_recipes",
        has_torch=False,
        has_posix=False,
    ),
    "formats": Verb(
        "list the number formats, or describe one", "recipes:run_formats", has_torch=False, has_posix=False
    ),
    "models": Verb(
        "list the named models with their parameters", "recipes:run_models", has_torch=False, has_posix=False
    ),
    "runs": Verb(
        "list the runs in a folder, with state and loss",
        "runs:run_runs",
        has_torch=False,
        has_posix=False,
    ),
}
#: The verbs by what they are for, in the order of the help; a verb in no group stands under "more".
GROUPS: Mapping[str, tuple[str, ...]] = {
    "plan": ("advise", "plan", "predict", "doctor"),
    "data and models": ("prepare", "import", "export", "served", "sample", "eval"),
    "train": ("train", "compare", "launch"),
    "look": ("watch", "report", "runs", "probe", "sensitivity", "search"),
    "measure this machine": ("bench", "scaling"),
    "what exists": ("recipes", "formats", "models"),
}


def grouped() -> dict[str, list[str]]:
    """Every verb, by group."""
    found = {group: [verb for verb in names if verb in VERBS] for group, names in GROUPS.items()}
    others = [verb for verb in VERBS if not any(verb in names for names in GROUPS.values())]
    return found | ({"more": others} if others else {})
