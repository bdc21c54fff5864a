"""Tests; `tests/fundamentals` reads as a tutorial."""
