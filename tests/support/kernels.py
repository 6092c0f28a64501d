"""Every level of the compiled kernels that this machine can run, for the tests of what calls them."""

import contextlib
from pathlib import Path

import torch

from secateur.native import available, convolutions, loading, operators

FOLDER = Path(loading.__file__).parent


def libraries():
    """Every shared object that this processor can run, and None: the dense products of torch."""
    found = [None]
    if available():
        level = loading.library().secateur_level()
        found += [name for at, name in loading._FILES.items() if at <= level and (FOLDER / name).exists()]
    return sorted(set(found), key=str)


@contextlib.contextmanager
def at_level(name):
    """Within, the operators call this shared object, or none."""
    before = operators.library, convolutions.library
    found = None if name is None else loading._opened(FOLDER / name)
    operators.library = convolutions.library = lambda: found
    try:
        yield
    finally:
        operators.library, convolutions.library = before


def with_threads(threads, own, body):
    """More threads than the sizes of a test would get: torch's, or the kernels' own."""
    work, before = operators._WORK_FOR_A_THREAD, torch.get_num_threads()
    compiled = operators.library()
    if compiled is not None:
        compiled.secateur_team(None if own else loading._team())
    operators._WORK_FOR_A_THREAD = 1
    torch.set_num_threads(threads)
    try:
        body()
    finally:
        operators._WORK_FOR_A_THREAD = work
        torch.set_num_threads(before)
