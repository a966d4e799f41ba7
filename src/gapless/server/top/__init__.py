"""A terminal screen that watches a server."""
