"""ZeroMQ under the envelopes: a server loop that reads bursts, a client with deadlines and heartbeats."""
