"""The contract between host and device: rows, their words, a step."""
