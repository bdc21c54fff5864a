"""The synchronizer: a pure decision core inside an asyncio shell. Never imports torch."""
