"""The fenced blocks of Markdown, and the lines of shell in them."""

import re
import shlex


def blocks(text: str, language: str) -> list[str]:
    """The contents of the blocks of one language, first to last; a title after the language is allowed."""
    found = re.findall(rf"^```{language}(?: [^\n]*)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [str(block) for block in found]


def titled(text: str) -> dict[str, str]:
    """The contents of the blocks that have a title, which is the name of a file, by that name."""
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    return {str(name): str(block) for name, block in found}


def shell_lines(text: str) -> list[list[str]]:
    """The words of each line of the `sh` blocks, continued lines put together."""
    lines = (line for block in blocks(text, "sh") for line in block.replace("\\\n", " ").splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]
