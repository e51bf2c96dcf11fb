"""The size of a model and the cost of a token, from its dimensions alone, without allocating anything.

Legend: D dim, N query heads, K key-value heads, H head_dim, F ffn_dim, V vocabulary, L layers, T tokens,
E experts.
"""

from narrowgauge.trainer.models.config import ModelConfig


def count_parameters(config: ModelConfig, active: bool = False) -> int:
    """The number of parameters; a tied head counts once, with the embedding.

    `active` counts only those that a token uses: of the experts as many as a token passes through.
    """
    D, V = config.dim, config.vocab_size
    positions = config.max_sequence_length * D if config.positions == "learned" else 0
    untied_head = 0 if config.tied_head else V * D
    norms = (2 * config.layers + 1) * D * (2 if config.norm == "layer" and config.bias else 1)
    head_norms = 2 * config.head_dim if config.qk_norm else 0
    blocks = config.layers * (sum(_block(config, active)) + head_norms)
    return V * D + positions + untied_head + norms + blocks


def count_block_weights(config: ModelConfig) -> int:
    """The number of weights in linear layers of blocks that a token uses: no embedding, head or norms."""
    return config.layers * _block(config, active=True)[0]


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of training per token, forward and backward.

        6 * P  +  12 * L * N * H * T

    P counts the weights in matmuls: those that a token uses in the blocks and in the output head (also when
    it is tied), not embedding look-ups, norms and biases. Each does one multiply-add in the forward pass and
    two in the backward pass: 6 FLOPs. Attention multiplies q with k and the scores with v, which takes 2 * 2
    * N * H * T FLOPs forward and three times that in all. This is the convention for model FLOPs utilization
    (PaLM, arXiv 2204.02311, appendix B): attention is *not* halved for its causal mask, and recomputation
    does not count.
    """
    matmul_parameters = count_block_weights(config) + config.vocab_size * config.dim
    attention = 12 * config.layers * config.heads * config.head_dim * sequence_length
    return 6 * matmul_parameters + attention


def _block(config: ModelConfig, active: bool) -> tuple[int, int]:
    """The weights of qkv, attention_out, router, up or gate_up, and down in one block, and their biases."""
    D, N, K, H, F = config.dim, config.heads, config.kv_heads, config.head_dim, config.ffn_dim
    mlps = (config.experts_per_token if active else config.experts) if config.experts else 1
    hidden = (2 if config.mlp == "swiglu" else 1) * F
    weights = D * (N + 2 * K) * H + N * H * D + config.experts * D + mlps * (hidden + F) * D
    biases = D + mlps * (hidden + D) if config.bias else 0
    return weights, biases + ((N + 2 * K) * H if config.qkv_bias else 0)
