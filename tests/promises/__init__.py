"""The run's promises under faults: each file breaks things on purpose and shows what still holds."""
