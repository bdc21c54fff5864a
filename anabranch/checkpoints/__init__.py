"""Checkpoints as files: where they lie, what makes one complete, and reading one. No torch, no decisions."""
