"""What runs inside a worker, and what parent and worker tell each other."""
