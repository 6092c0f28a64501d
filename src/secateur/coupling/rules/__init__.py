"""What torch's functions do: one declaration an operation, in a file a kind.

Law: a rule unifies what has to be the same, freezes what the function looks along or what the code fixed by a number,
and gives the result's dimensions; so whatever leaves the axes that stay free, the call still runs and its result loses
exactly what the rule says.

Importing this package registers them all.
"""

from secateur.coupling.rules import indexing, normalizations, pointwise, products, reductions, shapes, windows

__all__ = ["indexing", "normalizations", "pointwise", "products", "reductions", "shapes", "windows"]
