"""Layers that keep something else than keys and values: which models have them, and what replaces them."""
