"""What benchmarks share: taking turns, memory, processes, tables, texts and the small models that read them."""
