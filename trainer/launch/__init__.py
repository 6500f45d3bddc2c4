"""From one command per node to the ranks of a trainer: who is who, starting them, and starting them again. No torch here."""
