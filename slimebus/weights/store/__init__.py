"""What can be served: versions and their deltas, and the server that does it."""
