"""Error messages for a torch or other package that is missing, broken or too old."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.doctor.facts import LIMITS, dotted, release
from narrowgauge.trainer.cluster.doctor.torch_setup import fix_of, is_absent, words_of_import

_MORE = "'narrowgauge doctor' looks at the whole machine"


class NotInstalled(UserError):
    """A package that the verb needs cannot be imported: exit code 1."""

    exit_code = 1


def require_torch() -> None:
    """Import torch, or say why it cannot be imported."""
    try:
        import torch  # noqa: F401  alone, so that the error is torch's
    except Exception as error:  # anything that a broken installation raises
        words = words_of_import(error)
        why = "torch is not installed" if is_absent(words) else f"torch does not import: {words}"
        raise NotInstalled(f"{why}; {fix_of(words)}; {_MORE}") from error


def missing(names: Sequence[str]) -> NotInstalled:
    """The error for packages that are not installed."""
    packages = f"the packages {', '.join(names)} are" if len(names) > 1 else f"the package {names[0]} is"
    return NotInstalled(f"{packages} missing; python -m pip install {' '.join(names)}; {_MORE}")


def too_old() -> str:
    """The message for a torch that lacks what this package needs; "" if it is new enough."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    oldest = LIMITS["version"]["torch"]
    if release(found) >= oldest:
        return ""
    return f"torch {found} is too old; install torch {dotted(oldest)} or later; {_MORE} and names the build"
