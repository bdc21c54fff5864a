"""The decision core and its neighbours: plain synchronous tests that step a fake clock (`bench.py`)."""
