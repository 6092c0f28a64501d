"""What may leave: a file a kind."""

__all__: list[str] = []
