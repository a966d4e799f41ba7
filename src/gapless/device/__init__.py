"""Streams, events, buffers: one small protocol and its implementations."""
