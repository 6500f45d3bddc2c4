"""What crosses the wire: typed messages, envelopes, samples, errors; the transport and its security."""
