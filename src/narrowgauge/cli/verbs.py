"""The verbs of the command, each with the line that explains it."""

VERBS = {
    "train": "train a model; the same line again continues a run that stopped",
    "compare": "train the same model under several recipes, settings and seeds, side by side",
    "plan": "what a run will take, before it is started: memory by class, traffic, time, cost",
    "bench": "how fast a step is, against this machine's ceilings and beside plain torch",
    "doctor": "what is wrong with this machine, and how to fix it; exit code 1 if something is missing",
    "scaling": "measure the same training on 1..N processes: speed-up, efficiency, communication",
    "convert": "a run's newest state under another recipe, in a new run directory",
    "prepare": "turn documents into token files",
    "sample": "text from a run, or from a model of another program",
    "eval": "losses and scores of a run, or of a model of another program",
    "export": "a run's model for other programs",
    "import": "a model of another program as a run",
    "launch": "write the script that starts a run on a cluster",
    "report": "(re)make the HTML report of one run or several",
    "recipes": "the recipes that ship, or the TOML of one",
    "formats": "the number formats, or the facts of one",
}
WITHOUT_POSIX = ("doctor", "recipes", "formats")  # those that work on Windows, too
