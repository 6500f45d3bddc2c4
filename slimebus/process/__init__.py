"""What a process starts and loads: children, and functions by import path."""
