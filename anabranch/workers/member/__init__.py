"""Being a member of a run, without torch: what a process says and hears, and what it keeps of it."""
