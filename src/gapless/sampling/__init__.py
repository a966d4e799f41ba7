"""Sampling on the device: greedy, temperature, top-k, top-p, min-p, with random numbers keyed by position."""
