"""`make real`: trained networks that packages of PyPI carry, each through the verbs that fit it."""
