"""Forty faults planted in the numeric core, one at a time: which of them do the tests catch?

    python experiments/mutants.py [--only TEXT] [--out FILE]       forty runs of one or two test files
    python experiments/mutants.py --check                          that each fault still applies

The package is copied to a temporary folder and changed there; the checkout stays as it is. A fault is caught
if a test of its list fails, and survives if all pass. The first run, without a fault, must pass.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "narrowgauge"
ROUNDING, RANDOM = "formats/test_rounding.py", "formats/test_counter_rng.py"
QUANTIZE = (
    "quantization/test_scale_keys.py quantization/test_quantize.py quantization/test_transformer_engine.py"
)
ERRORS = "quantization/test_candidates.py quantization/test_projection.py"
LINEAR, HISTORIES = "nn/test_linear.py", "nn/test_histories.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: a text of a file, what replaces it, and the test files that must see it."""

    file: str
    before: str
    after: str
    tests: str


def _of(file: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(file, before, after, tests) for before, after in changes]


MUTANTS = [
    *_of(
        "formats/rounding.py",
        ROUNDING,
        ("x.clamp_(-fmt.max, fmt.max)", "x.clamp_(-fmt.max * 2, fmt.max * 2)"),
        ("clamp_(min=(fmt.emin + bias)", "clamp_(min=(fmt.emin + 1 + bias)"),
        ("up = fraction.ge_(0.5)", "up = fraction.gt_(0.5)"),
        ("integer.floor_())  # torch's", "integer.ceil_())  # torch's"),
        ("torch.where(above_smallest & (x", "torch.where(~above_smallest & (x"),
        ('special = float("inf") if fmt', 'special = float("inf") if not fmt'),
        ("return fraction.gt_(uniform)", "return fraction.lt_(uniform)"),
        ("1 - r * 2.0**-random_bits", "1 - r * 2.0 ** -(random_bits - 1)"),
        ("x if fmt.has_negative_zero else", "x if not fmt.has_negative_zero else"),
    ),
    *_of(
        "formats/codes.py",
        ROUNDING,
        ("2.0 ** (fmt.bias - _BIAS)", "2.0 ** (fmt.bias - _BIAS + 1)"),
        ("body > fmt.infinity_code", "body >= fmt.infinity_code"),
    ),
    *_of(
        "formats/counter_rng.py",
        RANDOM,
        ("_mix(low ^ self.key[0])", "_mix(low ^ self.key[1])"),
        ("(high * _GOLDEN)", "(high * 3)"),
        (".bitwise_right_shift_(8)", ".bitwise_right_shift_(7)"),
        ("^ step) ^ tensor)", "^ step) ^ step)"),
    ),
    *_of(
        "quantization/scales.py",
        QUANTIZE,
        ("encode = torch.where(amax == 0, 1.0, encode)", "encode = torch.where(amax == 0, 0.0, encode)"),
        ("& 0x7F800000).view(torch.float32)", "& 0x7FC00000).view(torch.float32)"),
        ("(mantissa <= 0x400000)", "(mantissa < 0x400000)"),
        ("1 << (22 - element.fraction_bits)", "1 << (23 - element.fraction_bits)"),
        (
            'if rule == "ceil":\n        exponent = exponent + ((',
            'if rule == "ceil":\n        exponent = exponent - ((',
        ),
        ("(exponent - element.emax).clamp(0, 254)", "(exponent - element.emax).clamp(1, 254)"),
        ("quotient = amax * (S * (1 / cast.aim))", "quotient = amax * S / cast.aim"),
        ("S = torch.where(unusable, 1.0, S)", "S = torch.where(unusable, 2.0, S)"),
        ('instead = 1.0 if rule == "one"', 'instead = 2.0 if rule == "one"'),
    ),
    *_of(
        "quantization/blocks.py",
        QUANTIZE,
        ("size[ndim - 2 if axis == ndim - 1 else ndim - 1] = rows", "size[ndim - 2] = rows"),
    ),
    *_of(
        "quantization/passes/rounding.py",
        "quantization/test_chunks.py",
        ("random.from_element(chunk.first_element(split)) if chunk.start", "random if chunk.start"),
    ),
    *_of(
        "quantization/block_scales.py",
        ERRORS,
        ("is_less = error < least", "is_less = error > least"),
        ("torch.where(below == 0, 1.0, above / below)", "torch.where(below == 0, 1.0, below / above)"),
    ),
    *_of(
        "quantization/stages/hadamard.py",
        "quantization/test_transformer_engine.py",
        ("(i & j).bit_count() / norm", "(i | j).bit_count() / norm"),
        ("16: (1, 1, 1, -1,", "16: (1, 1, -1, -1,"),
    ),
    *_of(
        "nn/linear_function.py",
        f"{LINEAR} nn/test_reuse.py",
        ('operands.of_weight(w_NK, "dgrad.w", 0)', 'operands.of_weight(w_NK, "dgrad.w", -1)'),
        ('operands.of(x.values, "wgrad.x", 0, amax', 'operands.of(x.values, "fprop.x", 0, amax'),
        ('operands.of(dy_MN, "wgrad.dy", 0, amax', 'operands.of(dy_MN, "dgrad.dy", 0, amax'),
        ("dy_MN.sum(0, dtype=torch.float32)", "dy_MN.mean(0, dtype=torch.float32)"),
    ),
    *_of(
        "nn/histories.py",
        HISTORIES,
        ('if cast.amax.algorithm == "max" else', 'if cast.amax.algorithm != "max" else'),
        ("element.max * 2.0**-margin", "element.max * 2.0**margin"),
    ),
    *_of("optim/muon.py", "optim/test_muon.py", ("-lr * 0.2 * max(shape)", "-lr * 0.2 * min(shape)")),
    *_of(
        "optim/schedule.py",
        "optim/test_schedule.py",
        ("lr * (step / warmup_steps)", "lr * ((step - 1) / warmup_steps)"),
        ("(1 - math.cos(math.pi * progress)) / 2", "(1 + math.cos(math.pi * progress)) / 2"),
    ),
    *_of("optim/grad_norm.py", "optim/test_adamw.py", ("(total + 1e-6), max=1.0", "(total + 1e-6), max=2.0")),
]


def changed(mutant: Mutant, text: str) -> str:
    """A file's text with the fault.

    Raises:
        ValueError: The text to replace is not there exactly once.
    """
    if text.count(mutant.before) != 1:
        raise ValueError(
            f"{mutant.file} has {mutant.before!r} {text.count(mutant.before)} times; renew the fault"
        )
    return text.replace(mutant.before, mutant.after)


def failing(package: Path, tests: str) -> str:
    """The first test that fails with the package in this folder; "" if all pass."""
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    files = [str(ROOT / "tests" / name) for name in tests.split()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--tb=no",
    ]
    done = subprocess.run(
        [*command, "-rfE", *files], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else f"exit code {done.returncode}"


def main() -> None:
    """Plants each fault and prints what the tests find."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="faults in files whose path has this text")
    parser.add_argument("--out", type=Path, help="a CSV file for the results")
    parser.add_argument("--check", action="store_true", help="only see that each fault applies")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.file]
    for m in chosen:
        changed(m, (PACKAGE / m.file).read_text(encoding="utf-8"))
    if options.check:
        print(f"{len(chosen)} faults apply")
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(PACKAGE, Path(folder) / "narrowgauge"))
        for tests in dict.fromkeys(m.tests for m in chosen):
            if found := failing(package, tests):
                sys.exit(f"without a fault: {found}; correct that first")
        for number, m in enumerate(chosen, 1):
            began, file = time.monotonic(), package / m.file
            original = file.read_text(encoding="utf-8")
            file.write_text(changed(m, original), encoding="utf-8")
            found = failing(package, m.tests)
            file.write_text(original, encoding="utf-8")
            rows.append({"file": m.file, "before": m.before, "after": m.after, "caught_by": found})
            seconds = time.monotonic() - began
            print(f"{number:2} {m.file}: {m.after!r}: {found or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
            if options.out:
                with options.out.open("w", encoding="utf-8", newline="") as out:
                    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
    caught = sum(bool(row["caught_by"]) for row in rows)
    print(f"{caught} of {len(rows)} caught")


if __name__ == "__main__":
    main()
