"""`completion`: a script that completes verbs, options and words as values in bash, zsh or fish.

The script holds all words, so that the Tab key starts no Python. It is made from the parsers of the verbs.
"""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping

from narrowgauge.cli.options import parsers
from narrowgauge.cli.parsing.key_parser import KeyParser
from narrowgauge.cli.parsing.options import SHORT
from narrowgauge.errors import unknown
from narrowgauge.models import model_names
from narrowgauge.quantization import cast_names, state_cast_names
from narrowgauge.recipes import ATTENTION_PLACES, GEMM_PLACES, GROUPS, recipe_names

_WORDS = re.compile(r"[a-z][a-z0-9-]*(\|[a-z][a-z0-9-]*)+")  # alternatives
_BASH = """\
# Completion of narrowgauge in bash, by: source <(narrowgauge completion bash)
_narrowgauge() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if ((COMP_CWORD == 1)); then
        words={verbs}
    else
        case ${{COMP_WORDS[1]}}:$before in
{values}
        esac
        if [[ -z $words && $word == -* ]]; then
            case ${{COMP_WORDS[1]}} in
{options}
            esac
        fi
    fi
    COMPREPLY=()
    [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _narrowgauge narrowgauge
"""
_ZSH = "# Completion of narrowgauge in zsh, by: source <(narrowgauge completion zsh)\n" + (
    "autoload -U +X bashcompinit && bashcompinit\n"
)


def run(options: argparse.Namespace) -> None:
    """Print the script."""
    if options.shell not in ("bash", "zsh", "fish"):
        raise unknown("shell", options.shell, ("bash", "zsh", "fish"))
    verbs = parsers()
    text = "\n".join(_fish(verbs)) + "\n" if options.shell == "fish" else _bash(verbs)
    print(_ZSH + text if options.shell == "zsh" else text, end="")


def _bash(verbs: Mapping[str, KeyParser]) -> str:
    values, options = [], []
    for verb, parser in verbs.items():
        by_words: dict[str, list[str]] = {}
        for action in _options(parser):
            by_words.setdefault(" ".join(_values(action)), []).extend(action.option_strings)
        for words, names in by_words.items():
            if words:
                pattern = "|".join(f"{verb}:{name}" for name in names)
                values.append(f"            {pattern}) words={shlex.quote(words)} ;;")
        every = " ".join(name for action in _options(parser) for name in action.option_strings)
        options.append(f"                {verb}) words={shlex.quote(every)} ;;")
    first = shlex.quote(" ".join([*verbs, "--help"]))
    return _BASH.format(verbs=first, values="\n".join(values), options="\n".join(options))


def _fish(verbs: Mapping[str, KeyParser]) -> Iterator[str]:
    yield "# Completion of narrowgauge in fish, by: narrowgauge completion fish | source"
    for verb, parser in verbs.items():
        what = _quoted(parser.description)
        yield f"complete -c narrowgauge -n __fish_use_subcommand -f -a {verb} -d {what}"
    for verb, parser in verbs.items():
        for action in _options(parser):
            line = f"complete -c narrowgauge -n '__fish_seen_subcommand_from {verb}'"
            for name in action.option_strings:
                line += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
            if words := _values(action):
                line += f" -x -a {_quoted(' '.join(words))}"
            elif action.nargs is None:
                line += " -r"
            yield line


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"


def _options(parser: KeyParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _values(action: argparse.Action) -> list[str]:
    """The words that an option takes; none if it takes numbers, files or free text."""
    name = action.option_strings[-1].removeprefix("--")
    key = SHORT.get(name, name)
    if key == "model.name":
        return model_names()
    if key == "recipe.name":
        return recipe_names()
    takes = action.metavar if isinstance(action.metavar, str) else ""
    if takes == "CAST":
        is_operand = key.removeprefix("recipe.") in (*GROUPS, *GEMM_PLACES, *ATTENTION_PLACES, "stream")
        return cast_names() if is_operand else [*cast_names(), *state_cast_names()]
    return takes.split("|") if _WORDS.fullmatch(takes) else []
