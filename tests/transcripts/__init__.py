"""Scenarios of the decision core as text: what is said to it, what it decides, and why. Begin with `join.txt`.

`python -m tests.transcripts` writes the files anew; `test_transcripts.py` compares them.
"""
