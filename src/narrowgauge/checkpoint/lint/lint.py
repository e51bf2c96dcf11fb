"""`lint`: looks for what is wrong with a quantized checkpoint, and lists it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.checkpoint.lint.layers import counts, layers_of
from narrowgauge.checkpoint.lint.promises import promises_of
from narrowgauge.checkpoint.lint.rules import RULES, SOURCES, Checked, Finding
from narrowgauge.checkpoint.lint.stored import open_checkpoint

_SHOWN = 3  # findings of a rule in the table


@dataclass(frozen=True)
class Linted:
    """What `lint` found.

    Attributes:
        path: The checkpoint.
        kinds: The number of weights of each kind; "wide" counts weights of 16 bits or more.
        method: The method of the configuration, such as "compressed-tensors"; "" without one.
        findings: In the order of `SOURCES`.
    """

    path: Path
    kinds: Mapping[str, int]
    method: str
    findings: tuple[Finding, ...]

    @property
    def narrow_tensors(self) -> int:
        """The number of weights of at most 8 bits."""
        return sum(self.kinds.values()) - self.wide_tensors

    @property
    def wide_tensors(self) -> int:
        """The number of other tensors of weights."""
        return self.kinds.get("wide", 0)

    def as_json(self) -> dict[str, Any]:
        """The findings for programs."""
        return {
            "checkpoint": str(self.path),
            "narrow_tensors": self.narrow_tensors,
            "wide_tensors": self.wide_tensors,
            "kinds": dict(self.kinds),
            "method": self.method,
            "findings": [
                {"rule": f.rule, "tensor": f.tensor, "text": f.text, "source": SOURCES[f.rule]}
                for f in self.findings
            ],
        }

    def table(self) -> str:
        """The findings as text, by rule."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items() if kind != "wide")
        said = f"; the configuration is of {self.method}" if self.method else ""
        lines = [
            f"{self.path}: {self.narrow_tensors} narrow weights{f' ({kinds})' if kinds else ''}, "
            f"{self.wide_tensors} wide{said}"
        ]
        for rule in dict.fromkeys(f.rule for f in self.findings):
            of_rule = [f for f in self.findings if f.rule == rule]
            lines.append(f"\n{rule}  ({SOURCES[rule]})")
            lines += [f"  {f.tensor}: {f.text}" for f in of_rule[:_SHOWN]]
            if len(of_rule) > _SHOWN:
                lines.append(f"  and {len(of_rule) - _SHOWN} more")
        if not self.findings:
            lines.append("no findings")
        return "\n".join(lines)


def lint(path: str | Path, whole: bool = False) -> Linted:
    """Look for faults in a quantized checkpoint; headers and samples are read, and nothing is executed.

    Args:
        path: A folder with safetensors (compressed-tensors, ModelOpt, FP8 of DeepSeek, torchao, gpt-oss) or
            GGUF, or one file of either.
        whole: Whether to read every code and scale, in place of 16 rows of each tensor.

    Returns:
        The number of weights of each kind, and the findings.

    Raises:
        UserError: There is no checkpoint at `path`.
    """
    found = open_checkpoint(Path(path))
    layers, alone = layers_of(found)
    promises = promises_of(found.settings)
    checked = Checked(found, layers, alone, promises, whole)
    order = list(SOURCES)
    findings = [finding for rule in RULES for finding in rule(checked)]
    findings.sort(key=lambda f: order.index(f.rule))
    method = "GGUF" if found.is_gguf else promises.method if promises else ""
    return Linted(Path(path), counts(layers.values()), method, tuple(findings))
