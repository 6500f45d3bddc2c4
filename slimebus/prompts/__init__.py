"""What a prompt is, and how files of prompts are read."""
