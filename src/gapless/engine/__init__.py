"""One loop, its thread, and what surrounds it: building, pausing, sleeping, the client's side."""
