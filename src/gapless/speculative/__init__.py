"""Drafts on the device: where they come from, and which of them are right."""
