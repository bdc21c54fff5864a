"""Checkpoints as files."""
