"""The verbs of the command: where the function of each is, and what it needs.

A function's signature gives the options of its verb, and its docstring the help (`cli.signature`). Its module
imports nothing heavy, so that help and usage errors appear at once.
"""

from collections.abc import Mapping
from importlib import import_module

from narrowgauge.trainer.cli.signature import Function

#: The module of each verb's function, in the groups and the order of the help.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "plan": {
        "advise": "trainer.laboratory.advise.advise",
        "plan": "trainer.laboratory.plan",
        "predict": "trainer.cli.verbs.predict",
        "doctor": "trainer.cli.verbs.machine",
    },
    "data and models": {
        "prepare": "trainer.cli.verbs.prepare",
        **dict.fromkeys(("import", "export", "served", "sample", "eval"), "trainer.cli.verbs.models"),
    },
    "train": {
        "train": "trainer.laboratory.train",
        "compare": "trainer.laboratory.compare",
        "launch": "trainer.cli.verbs.launch",
    },
    "look": {
        **dict.fromkeys(("watch", "report", "runs"), "trainer.cli.verbs.runs"),
        "probe": "trainer.laboratory.probe",
        "sensitivity": "trainer.laboratory.sensitivity",
        "search": "trainer.laboratory.search",
    },
    "measure this machine": dict.fromkeys(("bench", "scaling"), "trainer.cli.verbs.machine"),
    "what exists": dict.fromkeys(("recipes", "formats", "models"), "trainer.cli.verbs.recipes"),
}
VERBS: Mapping[str, str] = {verb: module for verbs in GROUPS.values() for verb, module in verbs.items()}
#: The verbs that need neither the file locks nor the signals of POSIX.
ANYWHERE = ("doctor", "predict", "recipes", "formats", "models", "runs")
#: The verbs that need no torch; `recipes` does for questions about this machine.
WITHOUT_TORCH = (*ANYWHERE, "prepare", "report", "watch")


def function_of(verb: str) -> Function:
    """The function of a verb."""
    module = import_module(f"narrowgauge.{VERBS[verb]}")
    function: Function = getattr(module, f"{verb}_" if verb in ("import", "eval") else verb)
    return function
