"""What is counted while a loader runs, and what follows from it."""
