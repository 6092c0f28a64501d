"""The compiled kernels: loading them, the operators that call them, and the layouts they read.

In ``csrc``, a header has the inner loops that several kernels share, ``planes.h`` where copied inputs lie,
``rounding.h`` how inputs become 8 bits. Values are float32, bfloat16, or int8 with scales.

Law: to ask which kernels there are imports no torch; a name is imported when it is first used (`__init__.pyi`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
