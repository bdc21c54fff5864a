"""The decision core without a server: in virtual time, and again from what was recorded."""
