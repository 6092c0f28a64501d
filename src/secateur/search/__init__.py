"""What a budget buys: levels of each group, and which of them together cost so much and lose least; `fit`."""

__all__: list[str] = []
