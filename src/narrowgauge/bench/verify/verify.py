"""`bench --verify`: checks that this machine computes matmuls, kernels, layers and losses correctly.

    matmuls     each scaled matmul of the device, against the same values in float64
    kernels     each kernel against its reference in plain torch, forward and backward
    layers      a linear layer under each recipe against the CPU's plain path
    determinism two backward passes under `training.deterministic`, bit for bit
    losses      a short training under each kind of recipe against the CPU's plain path
    collectives two processes exchange tensors, on two GPUs
    graphs      a short training from recorded launches against one launch by launch, bit for bit

On a GPU all checks run there. On a CPU, kernels run in Triton's interpreter on small tensors: that verifies
their values, but not a GPU's compiler. Checks that a machine cannot run are listed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console

from narrowgauge.bench.verify.check import AGREES, DIFFERS, NOT_HERE, SKIPPED, Check, Finding
from narrowgauge.bench.verify.collective_checks import collective_checks
from narrowgauge.bench.verify.determinism_checks import determinism_checks
from narrowgauge.bench.verify.graph_checks import GROUP, graph_checks
from narrowgauge.bench.verify.kernel_checks import kernel_checks
from narrowgauge.bench.verify.layer_checks import layer_checks, product_checks
from narrowgauge.bench.verify.loss_checks import loss_checks
from narrowgauge.bench.verify.worker import interpreted, run_all
from narrowgauge.kernels.dispatch import has_kernels
from narrowgauge.recipes import device_facts
from narrowgauge.runs.monitor.hardware import device_name
from narrowgauge.training.step.graph_choice import note_verified


@dataclass(frozen=True)
class Verdict:
    """The outcome of all checks on a device.

    Attributes:
        device: The name of the device.
        facts: The facts that decide which code runs there.
        findings: One per check.
    """

    device: str
    facts: str
    findings: Sequence[Finding]

    @property
    def is_right(self) -> bool:
        """Whether nothing differs."""
        return not any(f.outcome == DIFFERS for f in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings by outcome."""
        found = Counter(f.outcome for f in self.findings)
        return {outcome: found[outcome] for outcome in (AGREES, DIFFERS, NOT_HERE, SKIPPED)}

    def sentence(self) -> str:
        """The verdict in a line."""
        agrees, differs, not_here, skipped = self.counts.values()
        words = f"{agrees} of {agrees + differs} checks agree on {self.device}"
        words += f"; {not_here} need{'s' * (not_here == 1)} another device" if not_here else ""
        return words + (f"; {skipped} skipped" if skipped else "")

    def as_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        about = {"device": self.device, "facts": self.facts}
        return about | {"counts": self.counts, "checks": [asdict(f) for f in self.findings]}


def all_checks(device: torch.device) -> list[Check]:
    """Every check, in the order in which they run."""
    with interpreted(device):
        lacks = "" if has_kernels(device) else _LACKS[device.type == "cpu"]
    on_cpu = lacks if device.type == "cpu" else ""  # without kernels, the CPU would be compared with itself
    return [
        *product_checks(device),
        *kernel_checks(device, lacks),
        *layer_checks(on_cpu),
        *determinism_checks(device),
        *loss_checks(device, on_cpu),
        *collective_checks(device),
        *graph_checks(device),
    ]


_LACKS = {
    True: "on a CPU it takes a C compiler and Triton's interpreter (pip install triton)",
    False: "it takes Triton, a C compiler and a GPU that Triton compiles for; plain operations run here",
}


def verify(
    device: torch.device, console: Console, note: Callable[[Verdict], None] = lambda _: None
) -> Verdict:
    """Run every check on a device; print the differences and the checks that cannot run here.

    Args:
        device: a GPU, or the CPU.
        console: where findings are printed as they come.
        note: called after each check, with the findings so far.
    """
    verdict = Verdict(device_name(device), str(device_facts(device)), [])
    total, counted, found = len(all_checks(device)), Counter[str](), list[Finding]()
    with console.status("") as status:

        def say(what: Check | Finding) -> None:
            if isinstance(what, Check):
                if not console.is_terminal and not counted[what.group]:
                    console.print(f"{what.group} ...", highlight=False)
                counted.update(["begun", what.group])
                status.update(f"check {counted['begun']} of {total}, {what.group}: {what.name}")
                return
            if what.outcome == DIFFERS:
                _print(what, console)
            found.append(what)
            note(replace(verdict, findings=list(found)))

        findings = run_all(all_checks, device, say)
    verdict = replace(verdict, findings=findings)
    graphs = [f.outcome for f in findings if f.group == GROUP]
    if device.type == "cuda":
        note_verified(device, bool(graphs) and set(graphs) == {AGREES})
    _print_summary(verdict, console)
    return verdict


def _print(finding: Finding, console: Console) -> None:
    words = f"differs: {finding.group}, {finding.name}: {finding.found}\n  what to do: {finding.do}"
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def _print_summary(verdict: Verdict, console: Console) -> None:
    groups = dict.fromkeys(f.group for f in verdict.findings)
    for group in groups:
        own = [f for f in verdict.findings if f.group == group]
        agree, asked = (sum(f.outcome in words for f in own) for words in ((AGREES,), (AGREES, DIFFERS)))
        console.print(f"{group}: {agree} of {asked} agree", highlight=False)
        left_out = [f for f in own if f.outcome in (NOT_HERE, SKIPPED)]
        for outcome, words in dict.fromkeys((f.outcome, f.found) for f in left_out):
            names = ", ".join(f.name for f in left_out if f.found == words)
            console.print(f"  {outcome}: {names} ({words})", highlight=False, markup=False, soft_wrap=True)
    console.print(verdict.sentence(), style="bold", highlight=False, markup=False, soft_wrap=True)
