"""The demonstration, as a user runs it: real processes, real training, real kills."""
