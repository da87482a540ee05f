"""The epochs of a loader: tasks down, batches up, and what a state says of them."""
