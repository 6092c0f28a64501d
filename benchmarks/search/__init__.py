"""What `secateur.fit` finds, beside fixed allocations at the same budget."""
