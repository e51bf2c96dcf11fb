"""The front of the command: what it answers before torch is imported, and where torch does not import.

That is the help, the version, a word that is no verb, and `doctor`. Every other verb needs torch; where that
does not import, the answer is why, and what to do.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from narrowgauge.cli.ending import to_the_end
from narrowgauge.cli.parsing.parser import Parser, check_verb, command_parser, described
from narrowgauge.cli.parsing.verbs import VERBS, WITHOUT_POSIX
from narrowgauge.cluster.doctor.collect_software import folder_of
from narrowgauge.cluster.doctor.facts import LIMITS, dotted, release
from narrowgauge.cluster.doctor.torch_setup.import_errors import fix_of, is_absent, words_of_import
from narrowgauge.errors import UserError
from narrowgauge.operating_system import require_posix

_MORE = "'narrowgauge doctor' looks at the whole machine"


class NotInstalled(UserError):
    """A package that the verb needs does not import: exit code 1."""

    exit_code = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] and words[0] in VERBS and words[0] != "doctor":
        return to_the_end(lambda: _with_torch(words))
    return to_the_end(lambda: _without_torch(words))


def _without_torch(words: list[str]) -> int | None:
    """Answer what takes no torch: `doctor`, or what is said of the command as a whole."""
    check_verb(words)
    parser, verb, _ = command_parser(Parser)
    if words[:1] == ["doctor"]:
        try:
            from narrowgauge.cli import doctor  # takes longer to import than the rest together
        except ImportError:
            if folder_of("rich") is None:
                raise _missing(["rich"]) from None
            raise
        doctor.add_options(verb("doctor", doctor.run))
    else:
        for name in VERBS:
            verb(name, lambda options: None)
    options, rest = parser.parse_known_args(words)
    if rest:
        raise options.parser.unknown_argument(rest[0])
    code: int | None = options.action(options)
    return code


def _with_torch(words: list[str]) -> int:
    """Run a verb that needs torch.

    Raises:
        UserError: the verb needs another operating system.
        NotInstalled: torch, or another package, does not import.
    """
    if words[0] not in WITHOUT_POSIX:
        require_posix(words[0])
    if missing := [name for name in LIMITS["packages"] if folder_of(name) is None]:
        _show_verb(words)
        raise _missing(missing)
    try:
        import torch  # noqa: F401  by itself, to know whose error it is
    except Exception as error:  # whatever a broken installation raises
        _show_verb(words)
        raise _torch_does_not_import(words_of_import(error)) from error
    try:
        from narrowgauge.cli.main import main as run_verb
    except (ImportError, AttributeError):  # of a name that this torch does not have
        if sentence := _too_old():
            _show_verb(words)
            raise NotInstalled(sentence) from None
        raise
    return run_verb(words)


def _show_verb(words: list[str]) -> None:
    """Print what can be said of a verb without its options, if its help was asked for."""
    if {"-h", "--help"} & set(words):
        print(f"usage: narrowgauge {words[0]} ...\n\n{described(words[0])}")


def _torch_does_not_import(error: str) -> NotInstalled:
    why = "torch is not installed" if is_absent(error) else f"torch does not import: {error}"
    return NotInstalled(f"{why}; {fix_of(error)}; {_MORE}")


def _missing(names: Sequence[str]) -> NotInstalled:
    packages = f"the packages {', '.join(names)} are" if len(names) > 1 else f"the package {names[0]} is"
    return NotInstalled(f"{packages} missing; python -m pip install {' '.join(names)}; {_MORE}")


def _too_old() -> str:
    """The sentence for a torch that lacks what this package needs; "" if it is new enough."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    oldest = LIMITS["version"]["torch"]
    if release(found) >= oldest:
        return ""
    return f"torch {found} is too old; install torch {dotted(oldest)} or later; {_MORE} and names the build"
