"""The first bytes of files, which identify a format whatever the file is called.

llm.c's files begin with a little-endian int32 (source: github.com/karpathy/llm.c, and `dev/data/` there). A
pickle of protocol 2 or later begins with its PROTO opcode (source: Python's `pickletools`); `torch.save` puts
it into a zip archive.
"""

from enum import IntEnum


class LlmcMagic(IntEnum):
    """The first integer of each kind of llm.c file; `description` has an article if the kind is countable."""

    description: str

    GPT2_MODEL = 20240326, "a GPT-2 model"
    DEBUG_STATE = 20240327, "a debug state"
    TOKENIZER = 20240328, "a tokenizer"
    TOKENS = 20240520, "tokens"
    EVALUATION = 20240522, "an evaluation"
    TRAINING_STATE = 20240527, "a training state"
    LLAMA3_TOKENS = 20240801, "tokens of Llama 3"
    LLAMA3_MODEL = 20240803, "a Llama 3 model"

    def __new__(cls, value: int, description: str = "") -> "LlmcMagic":
        """Make a number with a description."""
        self = int.__new__(cls, value)
        self._value_, self.description = value, description
        return self


ZIP = b"PK\x03\x04"
PICKLE = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
