"""Where people train: adapters that make a Pruner at the right moment and carry its state in checkpoints."""
