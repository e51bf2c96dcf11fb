"""`lint`: what is wrong with checkpoints of other programs."""

import argparse
import json

from narrowgauge.checkpoint.lint.lint import lint


def run_lint(options: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 if there are any."""
    found = lint(options.path, options.all)
    print(json.dumps(found.as_json(), indent=1) if options.json else found.table())
    return 1 if found.findings else 0
