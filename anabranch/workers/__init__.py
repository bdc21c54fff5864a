"""Members of a run: the torch-free client, the training session, the evaluator, tasks."""
