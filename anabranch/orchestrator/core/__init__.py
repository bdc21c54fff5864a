"""Every decision, and nothing else: no I/O, no clock, no torch. Begin with `port.py`."""
