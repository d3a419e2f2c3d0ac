"""The parts of one update: micro batches of each rank, passes that score, losses, gradients."""
