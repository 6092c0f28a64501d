"""Processes that need not import torch again: a copy of the test's own, to be killed, and the ranks of a group."""

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter

import pytest
import torch
from torch import distributed, multiprocessing

from secateur.checkpoints import run as resumable
from secateur.checkpoints.run import JOURNAL
from secateur.models import files as block_files

# The first gradients of a process start a thread for each device, and a copy of a process with such threads has none.
# Of a CUDA build without a GPU fake values make one device: so these come first. Ranks may register a device before.
if multiprocessing.current_process().name == "MainProcess":
    torch.ones(1, requires_grad=True).sum().backward()

# what ranks need not import again, a second for each of them
IMPORTED = [
    *("torch._dynamo", "torch.distributed.fsdp", "pytest", "transformers.models.mixtral.modeling_mixtral"),
    *("transformers.models.llama.modeling_llama", "secateur.search", "secateur.recovery", "secateur.shrinking"),
]

# what every verb does that writes a directory, for `killing`
STEPS = {
    "write": (block_files, "write_tensor"),
    "copy": (resumable, "copy_tree"),
    "journal": (resumable.Run, "_write"),
    "publish": (resumable.Run, "publish"),
}


def forking():
    """What forks processes from one that has done nothing but import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def on_ranks(body, *arguments, ranks=2):
    """``body(rank, *arguments)`` in so many processes that `forking` makes."""
    forking()
    multiprocessing.start_processes(body, args=arguments, nprocs=ranks, start_method="forkserver")


def ended(body, *arguments, ranks, seconds):
    """The exit codes of such processes that none ends but they themselves, in so many seconds."""
    context = forking()
    started = [context.Process(target=body, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
    for each in started:
        each.start()
    end = time.monotonic() + seconds
    for each in started:
        each.join(max(0.0, end - time.monotonic()))
    codes = [each.exitcode for each in started]
    for each in started:
        each.kill()
    return codes


def leave_group():
    """The last line of such a body: this process ends here, once all the others have come as far.

    A body that returns frees what held the group while it holds Python's lock. A thread of gloo, which may still free
    tensors of the last barrier, waits for that lock, and the group waits for the thread: for ever, now and then.
    """
    distributed.barrier()
    sys.stderr.flush()
    os._exit(0)


def prepared_by_accelerate(rank, model):
    """What ``Accelerator.prepare`` makes of a model and its optimizer, in a process of a group that is there."""
    from accelerate import Accelerator

    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": distributed.get_world_size(), "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")  # asked for, and not used
    prepared, _ = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))
    assert isinstance(prepared, torch.nn.parallel.DistributedDataParallel)
    return prepared


def killing(moment, **places):
    """Counts the calls of functions, given as ``name=(owner, attribute)``, from here on, and kills this process at the
    n-th of one: ``"name:n"``. For a process that is forked: nothing is put back."""
    calls = Counter()

    def before(function, name):
        def call(*arguments, **keywords):
            calls[name] += 1
            if f"{name}:{calls[name]}" == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    for name, (owner, attribute) in places.items():
        setattr(owner, attribute, before(getattr(owner, attribute), name))
    return calls


def assert_killed(dying, moments, source, out):
    """``dying(moment, source, out)`` is killed at one moment after the other, and publishes nothing."""
    for moment in moments:
        assert os.WTERMSIG(forked(lambda: dying(moment, source, out))) == signal.SIGKILL, moment  # noqa: B023
        assert not out.exists()
        assert (out.with_name(f"{out.name}.unfinished") / JOURNAL).is_file()


@contextlib.contextmanager
def interrupted(owner, name, at=1):
    """The at-th call of a function is broken off by hand, and with it what called it."""
    right, calls = getattr(owner, name), []

    def call(*arguments, **keywords):
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return right(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, call)
        yield


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
