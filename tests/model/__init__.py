"""A model of the loader in plain Python, and random programs that are compared with it."""
