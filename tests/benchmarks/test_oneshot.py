"""The benchmarks of one-shot pruning run from end to end, measure what they say, and judge by it.

Law: no sentence is both calibrated on and measured on, an error is over all tokens, and a verdict follows from figures.
"""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from benchmarks.oneshot import crepe, layers, masks, peers, quality, speed, stages
from benchmarks.support import corpora
from benchmarks.support.language_models import MiniLM
from secateur import NM, Unstructured
from secateur.solvers import output_error, sparsegpt


@pytest.fixture(autouse=True)
def own_random_numbers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


SYLLABLES = ["ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "wi", "xo"]


@pytest.fixture
def some_docstrings(monkeypatch):
    """In place of those of the standard library, which take seconds to find; some stand in two files."""
    words = ["".join(three) for three in itertools.product(SYLLABLES, repeat=3)]
    sentences = [f"{word.title()} is a word that stands in this sentence and in no other one." for word in words]
    texts = [" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4)]
    monkeypatch.setattr(corpora, "docstrings", lambda *_: iter([*texts, *texts[:50]]))
    for function in (corpora.sentences, corpora.of_packages):
        function.cache_clear()
    yield texts
    for function in (corpora.sentences, corpora.of_packages):
        function.cache_clear()


@pytest.fixture
def minilm(some_docstrings, tmp_path):
    """A BERT of the kind that the benchmark reads, too small to be good at anything."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(some_docstrings, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    return MiniLM(tmp_path)


class Stack:
    """A subject as `MiniLM` and `GPT` are: blocks that are measured by how far their output is from the dense one's."""

    columns = ("distance",)
    higher_is_better = False

    def __init__(self):
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
        self.held_out = torch.randn(64, 16)

    def batches(self, seed, samples=400, size=None):
        generator = torch.Generator().manual_seed(seed)
        # first the quiet ones: an error over the first tokens is not the one over all
        return [scale * torch.randn(samples, 16, generator=generator) for scale in (0.1, 3.0)]

    @torch.no_grad()
    def measure(self, model):
        return (float((model(self.held_out) - self.model(self.held_out)).norm()),)


def test_a_layers_error_is_over_all_tokens_also_for_methods_that_need_no_gram_matrix():
    subject = Stack()
    before = [weight.clone() for weight in subject.model.parameters()]
    run = quality.prune(subject, "50%", "magnitude", 0, subject.batches(0))
    x = torch.cat(subject.batches(0))
    model, errors = subject.model, []
    for layer in (model[0][0], model[1][0]):
        weight = layer.weight.detach()
        new = weight * (weight.abs() > weight.abs().flatten().median())
        errors.append(float(output_error(weight, new, x.T @ x)))
        x = torch.tanh(x @ new.T + layer.bias.detach())
    assert run.error == pytest.approx(sum(errors) / 2, rel=1e-4)
    assert run.measures[0] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))  # a copy was pruned


@pytest.mark.parametrize("setting", ["50%", "70%", "2:4", "4:8"])
def test_plain_sparsegpt_is_the_librarys(setting):
    sparsity, pattern = quality.SETTINGS[setting]
    x = torch.randn(1024, 256) @ (torch.randn(256, 256) / 16 + torch.eye(256))
    weight, gram = torch.randn(96, 256), x.T @ x
    group = (pattern.n, pattern.m) if isinstance(pattern, NM) else None
    plain = speed.plain_sparsegpt(weight, gram, sparsity, group)
    new, mask = sparsegpt(weight, sparsity, pattern, gram=gram)
    assert ((plain != 0) == mask).double().mean() >= 0.999
    assert output_error(weight, plain, gram) == pytest.approx(float(output_error(weight, new, gram)), rel=1e-3)


def test_quality_prints_a_line_a_run_and_tables_that_agree_with_them(capsys):
    methods = ["magnitude", "sparsegpt", "alps", "admm"]
    results = quality.quality(Stack(), ["50%", "2:4"], methods, 2)
    printed = capsys.readouterr().out
    runs = results["runs"]
    assert [(run["seed"], run["setting"], run["method"]) for run in runs] == [
        (seed, setting, method) for seed in (0, 1) for setting in ("50%", "2:4") for method in methods
    ]
    assert results["dense"] == (0.0,)
    errors, distances, seconds = printed.split("after 2 of 2 seeds:")[1].strip().split("\n\n")[:3]
    assert errors.splitlines()[0] == "| layer error | 50% | 2:4 |"
    assert distances.splitlines()[2] == "| dense | 0.0000 | 0.0000 |"
    assert seconds.splitlines()[0] == "| CPU s: solver, whole | 50% | 2:4 |"
    row = next(line for line in errors.splitlines() if line.startswith("| magnitude"))
    own = torch.tensor([r["error"] for r in runs if (r["setting"], r["method"]) == ("2:4", "magnitude")])
    assert row.strip("| ").split(" | ")[2] == f"{own.mean():.4f} ± {own.std():.4f}"
    by_method = {run["method"]: run["error"] for run in runs if run["setting"] == "50%" and run["seed"] == 0}
    assert by_method["admm"] < by_method["sparsegpt"] < by_method["magnitude"]


def test_no_sentence_is_both_calibrated_on_and_measured_on(minilm):
    assert len(set(corpora.sentences())) == len(corpora.sentences()) == len(SYLLABLES) ** 3
    seen = [
        minilm.tokenizer.decode(row, skip_special_tokens=True)
        for seed in (0, 1)
        for batch in minilm.batches(seed, 1000)
        for row in batch["input_ids"]
    ]
    measured = [minilm.tokenizer.decode(minilm.tokenizer(text)["input_ids"]) for text in minilm.held_out]
    assert len(measured) == 1000
    assert len(set(seen)) > 1000  # seeds differ
    assert not set(seen) & set(measured)


# ---- beside other tools --------------------------------------------------------------------------------------------


@pytest.fixture
def llama(some_docstrings, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "LENGTH", 64)
    peers.prepare(tmp_path, hidden=32, layers=2, steps=2)
    return tmp_path


def test_what_a_tool_left_is_measured_in_the_model(llama):
    dense, texts = peers.load(llama)
    weights = {name: weight.detach().clone() for name, weight in peers.prunable(dense).items()}
    assert len(weights) == 14  # of two blocks; not the head
    untouched = peers.outcome(dense, weights, texts["held_out"])
    assert (untouched["sparsity"], untouched["head"], untouched["error"]) == (0, 0, 0)

    found = {
        method: peers.run(peers.Case("Secateur", method, "2:4"), llama, measure=True)
        for method in ("magnitude", "wanda", "sparsegpt", "admm")
    }
    for run in found.values():
        assert (run["sparsity"], run["head"]) == (0.5, 0)
        assert run["cpu"] > 0
    assert found["admm"]["error"] < found["sparsegpt"]["error"] < found["magnitude"]["error"]
    assert peers.run(peers.Case("Secateur", "wanda", "50%"), llama, measure=False).keys() == {"cpu", "wall", "peak"}


def test_the_sequences_that_measure_are_no_others(llama):
    _, texts = peers.load(llama)
    calibration, held_out = ({tuple(row) for row in texts[key].tolist()} for key in ("calibration", "held_out"))
    assert (len(calibration), len(held_out)) == (peers.CALIBRATION, peers.HELD_OUT)
    assert not calibration & held_out


def test_stages_are_measured_beside_all_at_once(capsys):
    rows = stages.stages(Stack(), ["50%", "2:4"], ["at once", "stages, aim 0.5"], seeds=2, samples=8, size=4)
    assert [(row["setting"], row["way"]) for row in rows] == [
        (setting, way) for setting in ("50%", "2:4") for way in ("at once", "stages, aim 0.5")
    ]
    assert all(len(row["runs"]) == len(row["seconds"]) == 2 for row in rows)
    assert capsys.readouterr().out.count("| 50% |") == 2


@pytest.mark.parametrize("way", ["hard", "soft", "hard, 50 %"])
def test_masks_that_are_learnt_keep_as_many_and_a_solver_keeps_them(way):
    subject = Stack()
    how = (0.5, Unstructured()) if "%" in way else (None, NM(2, 4))
    batches = [batch.split(50)[0] for batch in subject.batches(0)]
    start = masks.walked(copy.deepcopy(subject.model), batches, how)
    frozen = {name: subject.model.get_parameter(name).detach().clone() for name in start}
    given = batches, start, frozen, how[1], 80
    model = copy.deepcopy(subject.model)
    found, before, after = masks.chosen(model, *given, soft=way == "soft", forward=masks._named)
    again, *losses = masks.chosen(copy.deepcopy(subject.model), *given, soft=way == "soft", forward=masks._named)
    assert losses == [before, after]
    assert min(before, after) > 0  # on what is held back
    assert any(not torch.equal(found[name], start[name]) for name in start)
    solved = copy.deepcopy(subject.model)
    kept = masks.walked(solved, batches, how, found)
    for name, mask in found.items():
        assert torch.equal(mask, again[name])
        assert torch.equal(mask, kept[name])
        assert (how[1].pool(mask).sum(1) == how[1].pool(mask).shape[1] // 2).all()
        assert torch.equal(model.get_parameter(name), frozen[name] * mask)
        assert (solved.get_parameter(name)[~mask] == 0).all()
        assert not torch.equal(solved.get_parameter(name), model.get_parameter(name))  # what stays was repaired


def test_masks_are_measured_alone_and_solved_beside_recovery(capsys):
    class Judged(Stack):
        def measure(self, model):
            (gap,) = super().measure(model)
            return {"gap": gap, "perplexity": 1.0, "gap of the manual": 2 * gap}

    settings = {"50%": (0.5, Unstructured()), "2:4": (None, NM(2, 4))}
    rows = masks.masks(lambda _: Judged(), settings, masks.WAYS, 1, 2, most=1)
    ways = [(setting, way) for setting in settings for way in ("oneshot", *masks.WAYS)]
    assert [(each["setting"], each["way"]) for each in rows] == [each for each in ways if each != ("50%", "soft")]
    assert all(each["solved of the manual"] == 2 * each["solved"] > 0 for each in rows)
    told = capsys.readouterr().out
    assert "| 2:4 | recover |" in told
    assert "| gap, solved | of the manual |" in told


def test_networks_of_layers_are_measured_beside_criteria(monkeypatch, capsys):
    monkeypatch.setattr(layers, "NETWORKS", {"CNN": lambda: layers.Convolutions(2)})
    monkeypatch.setattr(layers, "STEPS", 40)
    (row,) = layers.layers([0.5], seeds=1)
    assert row.keys() == {"network", "sparsity", "dense", *layers.CRITERIA, *layers.WAYS}
    assert all(0 <= row[way][0] <= 100 for way in ("dense", *layers.CRITERIA, *layers.WAYS))
    assert "| CNN | 50% |" in capsys.readouterr().out


def test_a_frame_is_right_within_half_a_semitone():
    frames, cents = crepe.tones(40, seed=2)
    torch.testing.assert_close(frames.std(1), torch.ones(40))
    assert float(frames.mean(1).abs().max()) < 1e-5
    assert 1200 * math.log2(5.9) < float(cents.min()) < float(cents.max()) < 1200 * math.log2(102)
    for off, share in ((0, 100.0), (40, 100.0), (60, 0.0)):
        bins = ((cents + off - crepe.FIRST) / crepe.CENTS).round().long().clamp(0, crepe.BINS - 1)
        heard = iter(nn.functional.one_hot(bins, crepe.BINS).float().split(50))
        assert crepe.right(lambda _, heard=heard: next(heard), frames, cents) == share
