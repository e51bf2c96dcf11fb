"""The passes of quantization over all elements of a tensor: in torch operations, and in C on a CPU."""
