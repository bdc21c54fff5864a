"""Joining a run from other libraries' training loops."""
