"""What may leave: a file a kind."""
