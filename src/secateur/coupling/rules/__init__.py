"""What torch's functions do: one declaration an operation, in a file a kind.

Law: a rule unifies what has to be the same, freezes what the function looks along or what the code fixed by a number,
and gives the result's dimensions; so whatever leaves the axes that stay free, the call still runs and its result loses
exactly what the rule says.

Importing this package registers them all.
"""

from secateur.coupling.rules import indexing as indexing
from secateur.coupling.rules import normalizations as normalizations
from secateur.coupling.rules import pointwise as pointwise
from secateur.coupling.rules import products as products
from secateur.coupling.rules import reductions as reductions
from secateur.coupling.rules import shapes as shapes
from secateur.coupling.rules import windows as windows
