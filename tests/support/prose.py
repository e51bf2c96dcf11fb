"""Patterns of English that the project does not write, each with better words; and the prose of a file."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: Pattern -> better words. Each has few false positives: run a new one over docs/ and src/ before you add it.
_NO = r"(?<!there )\b(?:is|are|was|were) no (?!(?:longer|more|less|fewer|better|worse|larger)\b)[a-z]+"
_OWN = r"(?:its|one's|their|your|my|our) own\b"
_INVERTED = r"(?:^|[.:;]\s)(?:Whose|What|Which|How|Where)\b[^.?!|]{1,80}? (?:says|shows|decides) (?:the|a)\b"
PATTERNS = {
    r",\s+too\b": '"also", or leave it out',
    _NO: '"is not a ..."',
    r"\b(?:somebody|nobody|anybody)\b": "the person's role (a user, a reader), or the passive",
    r"\b(?:told|tells)\b": '"passes", "reports", "shows", "specifies"',
    r"\b(?:says|said)\b": '"specifies", "reports", "states", "prints"',
    r"\bso many\b": 'the number, or "n"',
    _INVERTED: "subject, verb, object",
    r"\bthat which\b": "the noun",
    r"\bmend(?:s|ed|ing)?\b": '"fix"',
    r"\bplugs?\b(?! ?-?in)": '"integration"',
    rf"\bof {_OWN}": '"its", "your", "separate"',
    r"\bbeside\b": '"next to", "with", "along with"',
    r"\bproducts\b": '"matmuls", "GEMMs"',
    r"\bnarrow numbers\b": '"low precision", "narrow formats"',
    r"\bin no need of\b": '"does not need"',
    r"\bfor want of\b": '"without", "because ... is missing"',
    r"\banew\b": '"again"',
    r"\bgo(?:es)? on\b(?! with)": '"continue"',
    r"\bnothing but\b": '"only"',
    r"\bholds? (?!for\b)[a-z ]{1,20} together\b": '"share", "shards of"',
    r"\bwhom\b": "the noun",
    r"\bthe own\b": '"our", "its"',
    r"\bthose of\b": "the noun, or its possessive",
    r"\b(?:in|out)side of\b": '"inside", "outside"',
    r"\bthe same goes for\b": '"also", or one sentence for both',
    r"\bwithout a word\b|\bin silence\b": '"silently"',
}


def of_page(text: str) -> str:
    """A Markdown page without its blocks of code, code within a line, and addresses of links; lines stay."""
    text = re.sub(
        r"^( *)```.*?^\1```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"`[^`\n]*`", "`code`", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def docstrings(path: Path) -> str:
    """The docstrings of a Python file, one after the other, without code."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
    return _without_code("\n\n".join(filter(None, found)))


def comments(path: Path) -> str:
    """The comments of a Python file, one a line, without code."""
    with io.BytesIO(path.read_bytes()) as file:
        tokens = list(tokenize.tokenize(file.readline))
    return _without_code("\n".join(token.string for token in tokens if token.type == tokenize.COMMENT))


def sentences(path: Path) -> str:
    """The strings of a Python file that have three words or more (messages, help texts), without code."""
    found = list[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "`code`" for part in node.values)
            found.append("".join(map(str, parts)))
    return _without_code("\n\n".join(text for text in found if len(text.split()) >= 3))


def _without_code(text: str) -> str:
    return re.sub(r"``?[^`\n]*``?", "`code`", text)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, the words that match, pattern) for each match of a pattern, in any case."""
    for pattern in PATTERNS:
        for match in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE):
            yield text.count("\n", 0, match.start()) + 1, match[0].strip(), pattern
