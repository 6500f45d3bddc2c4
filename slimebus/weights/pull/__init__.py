"""How a worker gets a version: connections, chunks, verification."""
