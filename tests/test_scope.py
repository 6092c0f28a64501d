"""Over what scores compare: the defaults of the verbs, their warnings, trained networks, and words for values.

Law: at its own default no criterion is worse than chance on the kind of network that its paper prunes.
"""

import copy
import functools
import importlib.util
import json
import statistics
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from secateur import (
    NM,
    Block,
    Channels,
    Pruner,
    Rows,
    Unstructured,
    criteria,
    make_masks,
    oneshot,
    regrowth,
    schedules,
    shrink,
    sparsify,
)
from secateur.allocation import above, by_name, erk, everywhere, owl, progression, uniform
from secateur.cli.commands import app
from secateur.solvers import alps, dsnot, from_criterion, sparsegpt, with_refit
from support.families import make
from support.laws import CRITERIA

PATH = Path(__file__).parents[1] / "benchmarks" / "criteria" / "run.py"
DEFAULTS = {"row": (Rows(), uniform), "layer": (Unstructured(), uniform), "model": (Unstructured(), everywhere)}


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 20))


def pairs():
    generator = torch.Generator().manual_seed(1)
    # a thousand times what the second layer sees
    return [(1000 * torch.randn(16, 40, generator=generator), torch.randint(20, (16,), generator=generator))]


def same(masks, others):
    assert masks.keys() == others.keys()
    return all(torch.equal(mask, others[name]) for name, mask in masks.items())


def pruner(model, criterion="random", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"schedule": schedules.constant(0.5), "batches": pairs(), "verbose": False, **options}
    return Pruner(model, optimizer, criterion=criterion, loss=cross_entropy, **options)


# ---- defaults ------------------------------------------------------------------------------------------------------


def test_a_criterion_says_over_what_its_scores_compare():
    assert [criteria.wanda.compares, criteria.ria.compares, criteria.magnitude.compares] == ["row", "layer", "model"]


@pytest.mark.parametrize("criterion", [each for each in CRITERIA if "movement" not in each.__name__])
def test_the_verbs_compare_as_the_criterion_says(criterion):
    pattern, allocate = DEFAULTS[criterion.compares]
    told = {"pattern": pattern, "allocate": allocate}
    found = []
    for options in ({}, told):
        torch.manual_seed(5)
        found.append(sparsify(two_layers(), 0.5, criterion=criterion, batches=pairs(), loss=cross_entropy, **options))
    assert same(*found)
    assert same(pruner(two_layers(), criterion).masks, pruner(two_layers(), criterion, **told).masks)


def test_a_layer_that_sees_small_inputs_keeps_its_share_of_wandas_and_rias_weights():
    for criterion in (criteria.wanda, criteria.ria, functools.partial(criteria.ria, power=1.0)):
        masks = sparsify(two_layers(), 0.75, criterion=criterion, batches=pairs())
        assert [float(mask.double().mean()) for mask in masks.values()] == [0.25, 0.25]
        model = two_layers()
        assert [float(m.double().mean()) for m in pruner(model, criterion).masks.values()] == [0.5, 0.5]


def test_a_function_of_ones_own_competes_over_the_model_unless_it_says_otherwise():
    def mine(weight):
        return weight.abs() * (100 if weight.shape[1] == 40 else 1)

    kept = [int(mask.sum()) for mask in sparsify(two_layers(), 0.5, criterion=mine).values()]
    assert kept == [959, 1]  # each tensor keeps one at least
    kept = [
        int(mask.sum()) for mask in sparsify(two_layers(), 0.5, criterion=criteria.compares("layer")(mine)).values()
    ]
    assert kept == [640, 320]
    with pytest.raises(ValueError, match="compare over 'row', 'layer', 'model'; got 'column'"):
        criteria.compares("column")


def test_a_pattern_that_is_given_is_kept_and_shared_out_within_layers():
    for pattern in (Block(5, 1), Channels(1)):
        masks = sparsify(two_layers(), 0.5, criterion="wanda", pattern=pattern, batches=pairs())
        assert same(
            masks, sparsify(two_layers(), 0.5, criterion="wanda", pattern=pattern, allocate=uniform, batches=pairs())
        )


def test_a_solver_compares_as_its_criterion_does():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    for solver, rows in ((from_criterion(criteria.wanda), True), (with_refit(dsnot), True), (sparsegpt, False)):
        model = copy.deepcopy(blocks)
        oneshot(model, [torch.randn(64, 8) * torch.arange(1, 9)], 0.5, solver=solver)
        assert all(bool((layer[0].weight.ne(0).sum(1) == 4).all()) for layer in model) == rows


# ---- warnings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"criterion": "wanda", "allocate": everywhere},
            "wanda scores the weights of one output .* 'uniform' or 'erk'",
        ),
        ({"criterion": "wanda", "pattern": Unstructured()}, r"wanda .* leave pattern out, or pass Rows\(\) or an n:m"),
        ({"criterion": "ria", "allocate": functools.partial(everywhere, min_kept=3)}, "ria .* of one layer"),
        ({"criterion": functools.partial(criteria.ria, power=1.0), "allocate": "everywhere"}, "one layer"),
        ({"criterion": "ria", "allocate": by_name({"0.weight": 0.5})}, "ranks them over the whole model"),
        ({"criterion": "ln_norm", "allocate": above(0.1)}, "ln_norm scores the weights of one layer"),
    ],
)
def test_a_wider_competition_warns_once_and_is_carried_out(options, message):
    rounds = {"rounds": 2} if options.get("allocate") is everywhere else {}
    for verb in (
        lambda: sparsify(two_layers(), 0.5, batches=pairs(), **options, **rounds),
        lambda: pruner(two_layers(), **options),
    ):
        with pytest.warns(UserWarning, match=message) as caught:
            verb()
        assert len(caught) == 1
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "options",
    [
        {"criterion": "wanda", "allocate": erk},
        {"criterion": "wanda", "allocate": owl},
        {"criterion": "wanda", "allocate": progression},
        {"criterion": "wanda", "pattern": NM(2, 4)},
        {"criterion": "wanda", "pattern": Channels(), "allocate": uniform},
        {"criterion": "ria", "pattern": Unstructured()},
        {"criterion": "ria", "pattern": Rows()},
        {"criterion": "ria", "allocate": by_name({"0.weight": 0.5}, otherwise=uniform)},
        {"criterion": "magnitude", "pattern": Rows(), "allocate": everywhere},
    ],
)
def test_a_narrower_competition_does_not_warn(options):
    sparsity = None if options.get("pattern") == NM(2, 4) else 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify(two_layers(), sparsity, batches=pairs(), **options)


# ---- trained networks ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("criteria_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


ONE_MORE = [pytest.param(name, marks=pytest.mark.examples) for name in ("convolutions", "transformer")]


@pytest.fixture(scope="module", params=["MLP", *ONE_MORE])
def trained(request, benchmark):
    """(network, digits, {sparsity: accuracy with as many weights removed at random})"""
    case = benchmark.CASES[request.param]
    if request.param == "convolutions":
        case = case._replace(make=lambda: benchmark.convolutions((8, 16, 24)))
    data = benchmark.load_digits()
    with torch.random.fork_rng(devices=[]):
        model = benchmark.trained(case, data, 0)
        assert benchmark.accuracy(model, data) > 90
        chance = {
            sparsity: statistics.mean(
                benchmark.accuracy(benchmark.pruned(model, sparsity, "random", data, seed)[0], data)
                for seed in range(3)
            )
            for sparsity in (0.5, 0.8)
        }
        return request.param, model, data, chance


@pytest.mark.parametrize("criterion", ["magnitude", "ln_norm", "lamp", "wanda", "ria", "taylor", "synflow"])
def test_no_default_is_worse_than_chance_on_a_trained_network(benchmark, trained, criterion):
    network, model, data, chance = trained
    # SynFlow knows no data, and its flow does not see what a transformer's normalizations do: there it is chance
    ahead = -10 if (network, criterion) == ("transformer", "synflow") else 5
    for sparsity, margin in ((0.5, ahead), (0.8, -5)):
        with torch.random.fork_rng(devices=[]):
            smaller, masks = benchmark.pruned(model, sparsity, criterion, data, 0)
        assert benchmark.accuracy(smaller, data) >= chance[sparsity] + margin
        if criteria.parse(criterion).compares != "model":
            assert min(float(mask.double().mean()) for mask in masks.values()) > (1 - sparsity) * 0.7


@pytest.mark.examples
def test_movement_is_not_worse_than_chance_where_a_network_learns_another_task(benchmark):
    """What it was made for; a network that has nothing more to learn does not move, and there it is noise."""
    data = benchmark.load_digits()
    with torch.random.fork_rng(devices=[]):
        model = benchmark.trained(benchmark.CASES["MLP"], data, 0)
        other = benchmark.turned(data)
        found, soft, chance = (
            benchmark.accuracy(benchmark.fine_tuned(model, 0.5, each, other, 0, 6), other)
            for each in ("movement", "soft_movement", "random")
        )
    assert min(found, soft) > chance - 3


@pytest.mark.examples
@pytest.mark.parametrize("criterion", ["snip", "grasp"])
def test_what_was_made_for_initialization_is_better_than_chance_there(benchmark, criterion):
    """At a minimum the mean gradient is noise, and what GraSP keeps is what leads away from it."""
    data, case = benchmark.load_digits(), benchmark.CASES["MLP"]
    with torch.random.fork_rng(devices=[]):
        found, chance = (
            [benchmark.accuracy(benchmark.from_scratch(case, s, each, data, 0), data) for s in (0.5, 0.95)]
            for each in (criterion, "random")
        )
    assert found[0] > chance[0] - 5
    assert found[1] > chance[1] + 5


# ---- words ---------------------------------------------------------------------------------------------------------


def test_words_mean_their_values_in_every_verb(tmp_path):
    for words, values in (
        ({"criterion": "lamp", "allocate": "erk"}, {"criterion": criteria.lamp, "allocate": erk}),
        ({"criterion": "Ln-Norm", "pattern": "rows"}, {"criterion": criteria.ln_norm, "pattern": Rows()}),
        ({"pattern": "5x1", "allocate": " UNIFORM "}, {"pattern": Block(5, 1), "allocate": uniform}),
    ):
        assert same(sparsify(two_layers(), 0.5, **words), sparsify(two_layers(), 0.5, **values))
        weights = {"w": torch.randn(10, 10)}
        assert same(make_masks(weights, 0.5, **words), make_masks(weights, 0.5, **values))
        words, values = {"criterion": "magnitude", **words}, {"criterion": criteria.magnitude, **values}
        assert same(pruner(two_layers(), **words).masks, pruner(two_layers(), **values).masks)
    assert same(sparsify(two_layers(), pattern="2:4"), sparsify(two_layers(), pattern=NM(2, 4)))

    shapes = []
    for options in (
        {"criterion": "ln_norm", "allocate": "everywhere"},
        {"criterion": criteria.ln_norm, "allocate": everywhere},
    ):
        smaller = shrink(two_layers(), torch.zeros(1, 40), 0.4, **options).model
        shapes.append([tuple(parameter.shape) for parameter in smaller.parameters()])
    assert shapes[0] == shapes[1]

    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    x = torch.randn(64, 8)
    pruned = []
    for options in (
        {"solver": "ALPS", "pattern": "2:4", "allocate": "uniform"},
        {"solver": alps, "pattern": NM(2, 4), "allocate": uniform},
    ):
        model = copy.deepcopy(blocks)
        oneshot(model, [x], **options)
        pruned.append(model.state_dict())
    assert same(*pruned)

    make("llama").save_pretrained(tmp_path / "dense")
    words = sparsify(tmp_path / "dense", 0.5, out=tmp_path / "a", criterion="lamp", pattern="4x4", allocate="erk")
    values = sparsify(
        tmp_path / "dense", 0.5, out=tmp_path / "b", criterion=criteria.lamp, pattern=Block(4, 4), allocate=erk
    )
    assert [t.zeros for t in words.inspection.tensors] == [t.zeros for t in values.inspection.tensors]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "wandaa"}, "no criterion is called 'wandaa'; did you mean wanda\\? There are grasp, lamp"),
        ({"criterion": "zz"}, "no criterion is called 'zz'. There are grasp, .* and wanda"),
        ({"allocate": "erc"}, "no allocation is called 'erc'; did you mean erk\\?"),
        ({"pattern": "row"}, "no pattern is called 'row'; did you mean rows\\?"),
    ],
)
def test_an_unknown_word_is_an_error_with_the_nearest_and_changes_nothing(options, message):
    model = two_layers()
    before = copy.deepcopy(model.state_dict())
    for verb in (
        lambda: sparsify(model, 0.5, **options),
        lambda: make_masks(dict(model.named_parameters()), 0.5, **options),
        lambda: pruner(model, **options),
        *([lambda: shrink(model, torch.zeros(1, 40), 0.5, **options)] if "pattern" not in options else []),
    ):
        with pytest.raises(ValueError, match=message):
            verb()
    assert same(model.state_dict(), before)


def test_an_unknown_solver_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match="no solver is called 'sparse-gpt'; did you mean sparsegpt"):
        oneshot(two_layers(), [torch.randn(4, 40)], 0.5, solver="sparse-gpt")


def test_what_is_neither_a_word_nor_a_value_is_a_type_error():
    with pytest.raises(TypeError, match="criterion is a function, or the word for one such as 'grasp', not 3"):
        sparsify(two_layers(), 0.5, criterion=3)
    with pytest.raises(TypeError, match="allocation is a function, or the word"):
        sparsify(two_layers(), 0.5, allocate=0.5)
    with pytest.raises(TypeError, match=r"a pattern is a value such as Rows\(\)"):
        sparsify(two_layers(), 0.5, pattern=Rows)


def test_weights_without_a_module_are_an_error_that_says_what_takes_them():
    with pytest.raises(TypeError, match=r"found in a module, not in a .*make_masks.*sparsify"):
        sparsify(two_layers().state_dict(), 0.5)


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_takes_the_same_words_and_defaults(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")

    def call(*words, out="out"):
        return CliRunner().invoke(
            app, ["prune", str(tmp_path / "dense"), "--out", str(tmp_path / out), "-s", "0.5", *words]
        )

    for words, message in (
        (("--criterion", "magnitud"), "no criterion is called 'magnitud'; did you mean magnitude?"),
        (("--allocate", "somewhere"), "no allocation is called 'somewhere'; did you mean everywhere?"),
        (("--criterion", "wanda"), "wanda asks for input_norm, which files of weights don't show"),
    ):
        ended = call(*words)
        assert ended.exit_code == 2
        assert message in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()
    for criterion, allocate in (("ln_norm", "uniform"), ("magnitude", "everywhere")):
        assert call("--criterion", criterion, out=criterion).exit_code == 0
        record = json.loads((tmp_path / criterion / "secateur.json").read_text())
        assert record["arguments"]["allocate"] == allocate
        assert record["pattern"] == record["arguments"]["pattern"] == "unstructured"


def test_masks_that_return_are_chosen_without_a_warning():
    """The Pruner's inner steps ask for counts that it has settled."""
    model = two_layers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = pruner(model, "ria", schedule=schedules.constant(0.5), regrow=regrowth.rigl(until=8), every=2)
        optimizer = trainer._optimizers[0]
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(model(pairs()[0][0] / 1000), pairs()[0][1]).backward()
            optimizer.step()
    assert [round(float(mask.double().mean()), 2) for mask in trainer.masks.values()] == [0.5, 0.5]
