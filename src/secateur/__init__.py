"""Prune PyTorch models: decide which weights go, remove them, and leave a model that is smaller and faster.

``from secateur import prune`` replaces ``from torch.nn.utils import prune``; `sparsify` is the one-call verb; every
kind of pruning is the same five steps: score, pool, count, keep, spread.

Law: ``__init__.pyi`` says what is here; a name is imported when it is first used, so that the command answers at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
