"""Read these first: one concept per test, the production path, a real server."""
