"""Each verb that runs in several processes, of a directory: 2 and 4 of gloo come to what one comes to; where one dies
the others end, and the run goes on to the same bytes.

Law: what is summed in another order is the same to rounding, and all else to the bit.
"""

import contextlib
import json
import os
import signal
import warnings

import pytest
import torch
from torch import distributed

from secateur import fit, oneshot, recover, sensitivity, shrink, sparsify, verify_checkpoint
from secateur.checkpoints import Run, open_checkpoint
from secateur.kinds import Experts
from secateur.recovery import directory as recovery
from secateur.search import fitting
from secateur.solvers import sparsegpt
from support.families import make
from support.fitting import blocks, inputs
from support.forks import ended, leave_group, on_ranks
from support.mixtures import batches as tokens_of_mixtures
from support.mixtures import mixtral
from support.stacks import contents

pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed"),
]


def texts(count=5):
    """Later ones are of other words: who sees the first alone chooses otherwise. They are no multiple of the ranks."""
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(1 + 12 * at, 12 + 12 * at, (1, 8), generator=draw) for at in range(count)]


def one_shot(folder, out, count=5):
    done = oneshot(folder / "dense", texts(count), 0.5, solver=sparsegpt, out=out)
    return [layer.tokens for layer in done.layers]


def shrunk(folder, out):
    done = shrink(folder / "dense", sparsity=0.3, out=out, batches=texts(), verify=False)
    return done.counts, done.fields, done.got, done.tokens


def experts(folder, out):
    done = shrink(folder / "mixture", leave=Experts(2), out=out, batches=tokens_of_mixtures(5), verify=False)
    return {name: round(share, 6) for name, share in done.mended.items()}


def measured(folder, out):
    found = sensitivity(make("llama"), texts(), shares=(0.25, 0.5), include="*mlp*", store=out)
    return dict(found.scores), found.levels.made.digest, found.passes


def in_memory():
    model = blocks(3)
    done = shrink(model, inputs(5)[0], 0.4, batches=inputs(5))
    return {name: mask.tolist() for name, mask in done.kept.items()}, done.got


def fitted(folder, out):
    asked = {"budget": {"params": 0.9}, "shares": (0.25, 0.5), "include": "model.layers.*.mlp.*", "finals": 1}
    done = fit(folder / "dense", texts(), out=out, **asked)
    return done.choice, done.finals, done.got, done.shrunk.parameters


def recovered(folder, out):
    given = [torch.cat(texts()), torch.cat(texts()[:3])]
    done = recover(folder / "sparse", folder / "dense", given, out=out, steps=4, local=0, rate=1e-3)
    assert all(before == after for before, after in done.zeros.values())
    return [round(loss, 4) for loss in done.losses]


# by their names: what runs, the rank that dies of two, and at which share of what it says to the other
VERBS = {
    "oneshot": (one_shot, 0, 0.7),
    "shrink": (shrunk, 1, 0.8),
    "experts": (experts, 0, 0.8),
    "sensitivity": (measured, 1, 0.7),
    "fit": (fitted, 0, 0.6),
    "recover": (recovered, 1, 0.6),
}
TO_THE_BIT = ("sensitivity", "fit")
WORDS = ("broadcast", "broadcast_object_list", "all_gather_object", "all_reduce", "barrier")


def joined(rank, folder, meet, ranks):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{folder}/{meet}", rank=rank, world_size=ranks)
    fitting.PASSES, recovery.EVERY = 8.0, 0.0


def counting(dies_at=0):
    """Counts what this process says to others, and kills it before it says so much."""
    said = []

    def before(word):
        right = getattr(distributed, word)

        def say(*given, **named):
            said.append(word)
            if len(said) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return right(*given, **named)

        setattr(distributed, word, say)

    for word in WORDS:
        before(word)
    return said


def all_verbs(rank, folder, name, ranks, alone):
    joined(rank, folder, f"all {name}", ranks)
    said, counts = counting(), {}
    for verb, (run, *_) in VERBS.items():
        before = len(said)
        assert run(folder, folder / name / verb) == alone[verb], verb
        counts[verb] = len(said) - before
    assert in_memory() == alone["in memory"]
    if ranks == 2:
        (folder / f"counts{rank}.json").write_text(json.dumps(counts))
        with pytest.raises(ValueError, match="at most"):  # what one finds is raised on both
            shrink(folder / "dense", sparsity=0.99, out=folder / "too much", batches=texts(), verify=False)
        if not rank:
            Run._check_source = full
        with pytest.raises((OSError, ValueError), match="no room"):  # only the first writes
            one_shot(folder, folder / "none")
    else:
        one_shot(folder, folder / name / "few", 2)
    leave_group()


def full(*_):
    raise OSError("no room")


def one_dies(rank, folder):
    """Every two processes are a group of their own."""
    verb = [*VERBS][rank // 2]
    run, victim, share = VERBS[verb]
    joined(rank % 2, folder, f"dies {verb}", 2)
    counts = json.loads((folder / f"counts{victim}.json").read_text())
    counting(round(share * counts[verb]) if rank % 2 == victim else 0)
    with contextlib.suppress(RuntimeError):  # what gloo says of it
        run(folder, folder / "again" / verb)
    os._exit(3)


def goes_on(rank, folder):
    joined(rank, folder, "goes on", 2)
    for verb, (run, *_) in VERBS.items():
        run(folder, folder / "again" / verb)
    leave_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    make("llama").save_pretrained(folder / "dense", max_shard_size="8KB")
    mixtral(6).save_pretrained(folder / "mixture", max_shard_size="90KB")
    sparsify(folder / "dense", 0.5, out=folder / "sparse")
    for name in ("1", "2", "4", "again"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(fitting, "PASSES", 8.0)
        one_shot(folder, folder / "1" / "few", 2)
        found = {verb: run(folder, folder / "1" / verb) for verb, (run, *_) in VERBS.items()}
        return {**found, "in memory": in_memory()}


@pytest.fixture(scope="module")
def of_two(folder, alone):
    on_ranks(all_verbs, folder, "2", 2, alone, ranks=2)
    return folder / "2"


@pytest.fixture(scope="module")
def of_four(folder, alone):
    on_ranks(all_verbs, folder, "4", 4, alone, ranks=4)
    return folder / "4"


def assert_alike(verb, one, several):
    if verb in TO_THE_BIT:
        assert contents(several) == contents(one)
        return
    one, several = open_checkpoint(one), open_checkpoint(several)
    assert [*one] == [*several]
    for name in one:
        torch.testing.assert_close(several[name], one[name], rtol=1e-3, atol=1e-5, msg=lambda m: f"{name} {m}")  # noqa: B023
        assert torch.equal(several[name].eq(0), one[name].eq(0)), name


@pytest.mark.parametrize("several", ["of_two", "of_four"])
def test_several_processes_come_to_what_one_comes_to(folder, several, request):
    several = request.getfixturevalue(several)
    for verb in VERBS:
        assert_alike(verb, folder / "1" / verb, several / verb)
    if (several / "few").exists():  # two of the four have no text
        assert_alike("oneshot", folder / "1" / "few", several / "few")
    for verb, source in {"oneshot": "dense", "shrink": "dense", "experts": "mixture", "recover": "sparse"}.items():
        assert not verify_checkpoint(several / verb, folder / source).problems, verb
    assert not list(several.glob("*.unfinished"))


def test_a_process_that_dies_ends_the_others_and_the_run_goes_on_to_the_same_bytes(folder, of_two):
    codes = ended(one_dies, folder, ranks=2 * len(VERBS), seconds=240)
    for at, (verb, (_, victim, _)) in enumerate(VERBS.items()):
        assert (codes[2 * at + victim], codes[2 * at + 1 - victim]) == (-signal.SIGKILL, 3), verb
    left = {each.name.removesuffix(".unfinished") for each in (folder / "again").iterdir()}
    assert left == {*VERBS}
    on_ranks(goes_on, folder)
    for verb in VERBS:
        assert contents(folder / "again" / verb) == contents(of_two / verb), verb
    assert sorted(each.name for each in (folder / "again").iterdir()) == sorted(VERBS)
