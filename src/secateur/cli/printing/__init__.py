"""What commands print of what was done: tables and sentences on a console on which nothing is markup.

Law: what comes from a file, names above all, is printed as `secateur.support.printable` spells it.
"""

__all__: list[str] = []
