"""The kernels in Triton. Only imported if `has_kernels` finds Triton installed."""
