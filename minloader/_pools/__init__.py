"""Where batches are made: this process, threads, worker processes, executors of the user's."""
