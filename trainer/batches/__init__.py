"""What a step trains on: groups from the broker, flat arrays, packed rows."""
