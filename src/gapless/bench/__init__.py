"""Benchmarks: named workloads, random-weight models of real shapes, and what is measured on them."""
