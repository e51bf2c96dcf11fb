"""The kernels themselves, in Triton. Imported only where `has_kernels` says that Triton is there."""
