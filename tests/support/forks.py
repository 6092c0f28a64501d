"""A copy of the test's process, to be killed: much cheaper than a new one, which would import transformers again."""

import os
import traceback
import warnings

import torch


def forked(body):
    """The exit status of a copy of this process that runs ``body``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, of which the child uses none
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]
