"""The first bytes of files, which identify a format whatever the file is called.

llm.c's files begin with a little-endian int32 (source: github.com/karpathy/llm.c, and `dev/data/` there). A
pickle of protocol 2 or later begins with its PROTO opcode (source: Python's `pickletools`); `torch.save` puts
it into a zip archive.
"""

from enum import IntEnum


class LlmcMagic(IntEnum):
    """The first integer of each kind of llm.c file."""

    GPT2_MODEL = 20240326
    DEBUG_STATE = 20240327
    TOKENIZER = 20240328
    TOKENS = 20240520
    EVALUATION = 20240522
    TRAINING_STATE = 20240527
    LLAMA3_TOKENS = 20240801
    LLAMA3_MODEL = 20240803

    @property
    def kind(self) -> str:
        """The kind of file in words."""
        return self.name.lower().replace("_", " ")


ZIP = b"PK\x03\x04"
PICKLE = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
