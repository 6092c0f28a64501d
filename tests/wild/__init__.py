"""Models as other libraries build them, on which every verb is tried: `python -m tests.wild.run`.

A registry is a file in `registries`; it imports its library inside `models()`, so that nothing here needs one.
"""
