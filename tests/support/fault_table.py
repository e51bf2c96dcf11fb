"""The fault table: what may go wrong with a run, one row a case, and which tests prove it.

A test has the mark `@case("A2")`, wherever it is. `make faults` runs the full table. CI runs the cases of
the tiers quick and thorough, at least one of each row; the default is "nightly". A row passes when all of
its tests do.
"""

from collections.abc import Callable
from typing import Any

import pytest

CASES = {
    "A1": "SIGKILL of all ranks, 50 times at random moments",
    "A2": "SIGKILL of one rank",
    "A3": "killed at each point inside a save",
    "A4": "SIGKILL of torchrun alone",
    "A5": "two jobs on one run directory",
    "A6": "resumed twice without a save between; at step 0; when finished",
    "A7": "resumed across an epoch, and in the middle of accumulation",
    "A8": "power cut: order of fsync and rename",
    "A9": "killed during an asynchronous save",
    "B1": "saved on 2 ranks, loaded on 1, 3, 4, and back",
    "B2": "dimensions that the ranks do not divide, shards smaller than a block",
    "B3": "a batch that the ranks do not divide",
    "B4": "FSDP to FSDP x TP and back",
    "C1": "one flipped bit in each file of the newest checkpoint",
    "C2": "files cut, empty, missing, extra; manifest missing, garbage, of another run",
    "C3": "all checkpoints damaged",
    "C4": "gone back, trained over the same steps, killed there",
    "C5": "a pickle as checkpoint, tokenizer, tokens, model to import",
    "C6": "hostile safetensors headers, paths that lead out of a folder",
    "C7": "configuration, recipe, text or tokenizer changed between two starts",
    "C8": "state of other formats than the optimizer's",
    "D1": "disk full while saving",
    "D2": "disk too small from the start, in bytes and in inodes",
    "D3": "file system read-only, directory gone, mount gone",
    "D4": "slow disk",
    "D5": "retention over 100 saves",
    "E1": "NaN in one gradient of one rank",
    "E2": "overflow in a scale, NaN codes, zero and subnormal blocks",
    "E3": "NaN in many steps in a row",
    "E4": "one NaN, then 200 good steps",
    "E5": "loss spike",
    "E6": "scales, histories, random bits and loss scale across a resume",
    "E7": "dtype of optimizer state across save and load",
    "E8": "a bit flipped in one replica",
    "E9": "uneven documents, masks, accumulation",
    "F1": "malformed JSON lines",
    "F2": "token file cut, grown, swapped, of another dtype",
    "F3": "token ids beyond the vocabulary, too little text",
    "F4": "prepare killed half-way",
    "F5": "remote reads that fail",
    "F6": "process that reads data killed",
    "G1": "SIGTERM, SIGINT, SIGUSR1 at random moments",
    "G2": "one rank stops answering",
    "G3": "one rank raises",
    "G4": "out of memory",
    "G5": "port in use, wrong world size, variables missing, clock set back",
    "G6": "leaks over 1000 steps",
    "G7": "leftovers of a process that was killed",
    "G8": "a logger's back end is down",
}


def case(*names: str, tier: str = "nightly") -> Callable[[Any], Any]:
    """Decorates a test (or a set of its parameters, as `marks`) that proves these rows, in a tier."""
    assert all(name in CASES for name in names), names

    def mark(test: Any) -> Any:
        test = pytest.mark.case(*names)(test)
        return test if tier == "quick" else pytest.mark.tier(tier)(test)

    return mark


# Those parameters of a test that wait for `make faults`.
LATER = pytest.mark.tier("nightly")
RANKS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=LATER)], ids=["1 rank", "2 ranks"])
