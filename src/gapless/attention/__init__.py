"""Attention over the paged KV cache: the plain-torch reference and the Triton kernels, one call for both."""
