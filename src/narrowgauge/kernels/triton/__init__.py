"""The kernels in Triton. Imported only if `has_kernels` finds Triton installed."""
