"""Bookkeeping of the KV cache in plain Python: who owns which block. Tensors belong to the pipeline."""
