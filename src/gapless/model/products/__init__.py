"""Products of activations with weights: which kernel, and the kernels."""
