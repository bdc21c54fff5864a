"""What a machine with a GPU is asked once it is there: does a run work on it, and what does taking part cost?

`scripts/gpu_check.sh` runs this; docs/gpu/README.md says what is measured.
"""
