"""What a worker can train."""
