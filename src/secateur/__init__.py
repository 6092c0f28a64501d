"""Prune PyTorch models."""
