"""Measurements of Secateur beside its rivals: a folder a topic, and what they share in `benchmarks.support`."""
