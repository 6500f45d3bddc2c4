"""What starts, watches, restarts and ends processes."""
