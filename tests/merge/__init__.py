"""Numerics, against a straightforward float64 implementation in `reference.py`."""
