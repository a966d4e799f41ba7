"""Watch a running server in a terminal."""
