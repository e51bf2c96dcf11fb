"""The text of a PTX kernel as blocks of instructions."""

import re
from dataclasses import dataclass, field


class Refused(Exception):
    """A kernel does what this executor does not, or what no GPU defines."""


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands`; a vector `{a, b}` is a tuple of operands, an address is "[a+b]"."""

    opcode: str
    operands: tuple[str | tuple[str, ...], ...]
    guard: str = ""

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}"


@dataclass
class Kernel:
    """An entry: its parameters as (name, type), threads of a block, registers, blocks of instructions."""

    name: str
    parameters: list[tuple[str, str]]
    threads: int
    registers: dict[str, str] = field(default_factory=dict)  # of each register or its prefix: pred, b16, ...
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def type_of(self, register: str) -> str:
        """The declared type of a register."""
        found = self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))
        if found is None:
            raise Refused(f"{self.name} uses {register}, which it does not declare")
        return found


_TARGET = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)")
_TOKEN = re.compile(r"\s*(?:(?P<scope>[{}])|(?P<label>[$\w]+):|(?P<statement>[^;{]*(?:\{[^}]*\}[^;{]*)*);)")
#: Directives that say where code comes from, or how fast it may be.
_SILENT = (".loc", ".file", ".pragma")
_ENDS = ("bra", "bra.uni", "ret", "exit")


def parse(text: str) -> Kernel:
    """The only entry of a module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{", text, re.DOTALL)
    if head is None or text.count(".entry") != 1:
        raise Refused("the module does not have one entry")
    threads = re.search(r"\.reqntid (\d+)", head[3])
    if threads is None:
        raise Refused(f"{head[1]} does not say how many threads a block has")
    parameters = re.findall(r"\.param \.(\w+)[^,]*?(\w+)(?:,|\s*$)", head[2])
    kernel = Kernel(head[1], [(name, kind) for kind, name in parameters], int(threads[1]))
    lines = (line.strip() for line in _body(text[head.end() :]).splitlines())
    _read_body(kernel, "\n".join(line for line in lines if not line.startswith(_SILENT)))
    return kernel


def _body(text: str) -> str:
    """All up to the brace that closes the entry; inline assembly has its braces."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    raise Refused("an entry that does not end")


def _read_body(kernel: Kernel, body: str) -> None:
    at, blocks = 0, [[]]
    targets = set(_TARGET.findall(body))  # all other labels are for debuggers
    while at < len(body.rstrip()):
        found = _TOKEN.match(body, at)
        if found is None:
            raise Refused(f"{kernel.name}: cannot read {body[at : at + 60]!r}")
        at = found.end()
        if label := found["label"]:
            if label in targets:
                if blocks[-1]:
                    blocks.append([])
                kernel.labels[label] = len(blocks) - 1
        elif (statement := found["statement"]) is not None and statement.strip():
            if statement.startswith(".reg"):
                _declare(kernel, statement)
                continue
            blocks[-1].append(_instruction(statement))
            if blocks[-1][-1].opcode in _ENDS:
                blocks.append([])
    kernel.blocks = blocks


def _declare(kernel: Kernel, statement: str) -> None:
    """Registers, alone or as `%r<9>`; a name of two scopes keeps its type."""
    _, kind, names = statement.split(None, 2)
    for name in names.split(","):
        kernel.registers[name.strip().partition("<")[0]] = kind.lstrip(".")


def _instruction(statement: str) -> Instruction:
    guard, rest = "", statement.strip()
    if rest.startswith("@"):
        guard, rest = rest[1:].split(None, 1)
    opcode, _, rest = rest.partition("\t") if "\t" in rest.split(" ")[0] else rest.partition(" ")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+", rest)
    return Instruction(opcode.strip(), tuple(map(_operand, operands)), guard)


def _operand(text: str) -> str | tuple[str, ...]:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    return re.sub(r"\s+", "", text)
