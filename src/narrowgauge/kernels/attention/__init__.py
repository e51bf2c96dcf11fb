"""How is attention computed? By torch's fused kernels, or on a CPU with an order for every sum."""

from narrowgauge.kernels.attention.attention import (
    Attention,
    attend,
    attend_with_dropout,
    document_mask,
)

__all__ = ["Attention", "attend", "attend_with_dropout", "document_mask"]
