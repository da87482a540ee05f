"""How data crosses between processes: shared files, slots, pickling, the job file."""
