"""Keys and values of the tokens seen so far, so that each further token costs one token's work.

Attention at token t reads the keys and values of tokens 0 to t, and none of them depends on later tokens, so
they are computed once and kept. The first call takes any number of tokens, each later call one.

    bytes = 2 * layers * B * K * capacity * H * bytes per element

Legend: B sequences, T new tokens, K key-value heads, H head_dim.
"""

from torch import Tensor


class KVCache:
    """The keys and values of one layer; memory is allocated once, for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of T new tokens, and return the keys and values of all tokens so far."""
        start, end = self.length, self.length + k_BKTH.shape[2]
        assert start == 0 or end == start + 1, "several new tokens after others would need a separate mask"
        assert end <= self.capacity
        if self._kept is None:
            B, K, _, H = k_BKTH.shape
            self._kept = k_BKTH.new_empty(B, K, self.capacity, H), v_BKTH.new_empty(B, K, self.capacity, H)
        for kept, new in zip(self._kept, (k_BKTH, v_BKTH), strict=True):
            kept[:, :, start:end] = new
        self.length = end
        k, v = (kept[:, :, :end] for kept in self._kept)
        return k, v
