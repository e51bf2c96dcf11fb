"""The size of a model and the cost of a token, from its dimensions alone: nothing is allocated.

Legend: D dim, N query heads, K key-value heads, H head_dim, F ffn_dim, V vocabulary, L layers, T tokens.
"""

from narrowgauge.models.config import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters; a tied head counts once, with the embedding."""
    D, V = config.dim, config.vocab_size
    positions = config.max_sequence_length * D if config.positions == "learned" else 0
    untied_head = 0 if config.tied_head else V * D
    norms = (2 * config.layers + 1) * D * (2 if config.norm == "layer" and config.bias else 1)
    head_norms = 2 * config.head_dim if config.qk_norm else 0
    blocks = config.layers * (_block_matmul_parameters(config) + _block_biases(config) + head_norms)
    return V * D + positions + untied_head + norms + blocks


def count_block_weights(config: ModelConfig) -> int:
    """The number of weights of linear layers in the blocks: without embedding, head, norms and biases."""
    return config.layers * _block_matmul_parameters(config)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations that training takes for one token, forward and backward.

        6 * P  +  12 * L * N * H * T

    P counts the weights of matrix products: those of the blocks and of the output head (also when it is
    tied), not embedding look-ups, norms and biases. Each does one multiply-add in the forward pass and two
    in the backward pass: 6 operations. Attention multiplies q with k and the scores with v, which takes
    2 * 2 * N * H * T operations forward and three times that in all. This is the convention for model FLOPs
    utilisation (PaLM, arXiv 2204.02311, appendix B): the attention is *not* halved for its causal mask, and
    recomputation does not count.
    """
    matmul_parameters = count_block_weights(config) + config.vocab_size * config.dim
    attention = 12 * config.layers * config.heads * config.head_dim * sequence_length
    return 6 * matmul_parameters + attention


def _block_matmul_parameters(config: ModelConfig) -> int:
    """Weights of qkv, attention_out, up or gate_up, and down in one block."""
    D, N, K, H, F = config.dim, config.heads, config.kv_heads, config.head_dim, config.ffn_dim
    attention = D * (N + 2 * K) * H + N * H * D
    return attention + (3 if config.mlp == "swiglu" else 2) * D * F


def _block_biases(config: ModelConfig) -> int:
    D, N, K, H, F = config.dim, config.heads, config.kv_heads, config.head_dim, config.ffn_dim
    qkv = (N + 2 * K) * H if config.qkv_bias else 0
    others = D + (2 if config.mlp == "swiglu" else 1) * F + D if config.bias else 0
    return qkv + others
