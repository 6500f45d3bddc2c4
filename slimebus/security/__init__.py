"""Who may speak on the bus: keys, the allow-list, roles, and the rule that nothing listens beyond this machine without them."""
