"""Redis and nothing else: key names, messages, payload blobs, streams, fenced scripts, the embedded server."""
