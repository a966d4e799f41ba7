"""Who owns which block of the KV cache. Tensors belong to the runner."""
