"""One file a library of models; each has ``models() -> list[Wild]``."""
