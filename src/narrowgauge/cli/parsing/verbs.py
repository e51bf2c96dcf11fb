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
    "probe": "what recipes do to a model's loss and gradient, without training",
    "sensitivity": "what narrowing each layer and place alone would cost a model",
    "search": "the recipe that costs a model least, with a share of its FLOPs in 4 bits",
    "launch": "write the script that starts a run on a cluster",
    "report": "(re)make the HTML report of one run or several",
    "recipes": "the recipes that ship, or the TOML of one; with --device, what another device multiplies",
    "formats": "the number formats, or the facts of one",
    "models": "the named sizes with their parameters",
    "runs": "the run directories of a folder, with state and loss",
    "completion": "a script that completes verbs, options and names in bash, zsh or fish",
}
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
    "quantize": "convert RUN --recipe R --out DIR",
}
WITHOUT_POSIX = (
    "doctor",
    "recipes",
    "formats",
    "models",
    "runs",
    "completion",
)  # those that work on Windows, too
