"""Calibration data: every sequence is text of the source, whatever the size of the file; errors that say what to do."""

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secateur.checkpoints import CheckpointError
from secateur.models import batches as calibration
from secateur.models import read_calibration, read_pictures
from secateur.models.batches import longest_sequence
from secateur.models.solving import digest
from secateur.support import documents
from support.tokenizers_of_words import write_tokenizer

WORDS = [f"w{number}" for number in range(500)]
BEGIN, END, UNKNOWN = 0, 1, 2
FIRST = 3  # the token of w0


def build(folder, *, special=True, config=None, tokenizer_config=None):
    """A tokenizer of words, each a token, that begins a text with <s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate(["<s>", "</s>", "?", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    folder.mkdir(exist_ok=True)
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "?"} if special else {"unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=made, **options, **(tokenizer_config or {})).save_pretrained(folder)
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 64, **(config or {})}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model") / "with")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model") / "plain", special=False)


def counting(count, begin=0):
    """w0 w1 w2 … so that a window of text is a run of numbers."""
    return " ".join(WORDS[at % len(WORDS)] for at in range(begin, begin + count))


def is_run(tokens):
    numbers = [token - FIRST for token in tokens]
    return all((after - before) % len(WORDS) == 1 for before, after in itertools.pairwise(numbers))


def lines(path, count, words, **more):
    documents = [counting(words, 12 * at) for at in range(count)]
    path.write_text("".join(json.dumps({"text": each, **more}) + "\n" for each in documents))
    return path


# ---- from text ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(2, 20), st.integers(0, 10), st.sampled_from([1, 16]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_of_a_text(model, tmp_path, samples, length, seed, sparse):
    """Read whole or in places: runs of the text after the tokenizer's beginning, none of them twice."""
    file = tmp_path / "text.txt"
    file.write_text(counting(2000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_SPARSE", 400 // sparse)
        found = read_calibration(file, tokenizer_directory=model, samples=samples, sequence_length=length, seed=seed)
        again = read_calibration(file, tokenizer_directory=model, samples=samples, sequence_length=length, seed=seed)
    assert [tokens.shape for tokens in found] == [(1, length)] * samples
    assert all(tokens.dtype == torch.int64 for tokens in found)
    for tokens in found:
        assert tokens[0, 0] == BEGIN
        assert is_run(tokens[0, 1:].tolist())
    assert digest(found) == digest(again)


def test_all_of_a_large_file_has_its_chance(model, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "_SPARSE", 8)
    file = tmp_path / "text.txt"
    file.write_text("\n".join(" ".join(f"w{part}" for _ in range(1000)) for part in range(100, 120)))
    read = []
    decoded = documents.decoded
    monkeypatch.setattr(
        documents, "decoded", lambda data, *rest, **more: read.append(len(data)) or decoded(data, *rest, **more)
    )
    found = read_calibration(file, tokenizer_directory=model, samples=20, sequence_length=11, seed=1)
    assert sorted({int(tokens[0, 5]) - FIRST for tokens in found}) == list(range(100, 120))
    assert [int(tokens[0, 5]) - FIRST for tokens in found] != list(range(100, 120)), "in the seed's order"
    assert sum(read) < file.stat().st_size / 10
    other = read_calibration(file, tokenizer_directory=model, samples=20, sequence_length=11, seed=2)
    assert digest(found) != digest(other)


@pytest.mark.parametrize("sparse", [100, 4])
def test_records_are_packed_with_the_end_of_text_between(model, tmp_path, monkeypatch, sparse):
    monkeypatch.setattr(calibration, "_SPARSE", sparse)
    file = lines(tmp_path / "text.jsonl", 40, 7, meta="x" * 20)
    found = read_calibration(file, tokenizer_directory=model, samples=6, sequence_length=17)
    seen = set()
    for tokens in found:
        body = tokens[0, 1:].tolist()
        assert tokens[0, 0] == BEGIN
        assert body.count(END) == 2
        for document in "".join("|" if token == END else f" {token}" for token in body).split("|"):
            run = [int(token) for token in document.split()]
            assert is_run(run)
            assert len(run) <= 7
        assert not seen & set(body) - {END}, "no document twice"
        seen |= set(body) - {END} if sparse == 4 else set()


@pytest.mark.parametrize("form", ["jsonl", "array", "strings", "documents", "records", "generator", "bom", "crlf"])
def test_forms_of_the_same_documents(model, tmp_path, form, monkeypatch):
    monkeypatch.setattr(calibration, "_SPARSE", 1000)
    documents = [counting(30, 7 * at) for at in range(10)]
    records = [{"text": each} for each in documents]
    file = tmp_path / ("text.json" if form in ("array", "strings") else "text.jsonl")
    ending = "\r\n" if form == "crlf" else "\n"
    file.write_bytes((b"\xef\xbb\xbf" if form == "bom" else b"") + ending.join(map(json.dumps, records)).encode())
    source = file
    if form in ("array", "strings"):
        file.write_text(json.dumps(records if form == "array" else documents))
    elif form in ("documents", "generator"):
        source = documents if form == "documents" else (each for each in documents)
    elif form == "records":
        source = records
    found = read_calibration(source, tokenizer_directory=model, samples=3, sequence_length=21)
    expected = read_calibration(documents, tokenizer_directory=model, samples=3, sequence_length=21)
    assert digest(found) == digest(expected)


@pytest.mark.parametrize(
    ("letters", "sparse"), [(3, 40), (3, 1000), (12, 1000)], ids=["in places", "whole", "words longer than a piece"]
)
def test_letters_of_several_bytes_are_not_cut(model, tmp_path, monkeypatch, letters, sparse):
    monkeypatch.setattr(calibration, "_SPARSE", sparse)
    monkeypatch.setattr(documents, "PIECE", 101)
    pieces = []
    whole = documents.pieces
    monkeypatch.setattr(documents, "pieces", lambda *of: (pieces.append(each) or each for each in whole(*of)))
    file = tmp_path / "text.txt"
    file.write_text(" ".join(["ä€𝄞" * letters] * 400) + " é", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"100% of its tokens are \?, which stands for"):
        found = read_calibration(file, tokenizer_directory=model, samples=12, sequence_length=20)
    assert len(found) == 12
    assert "".join(pieces) == ("" if sparse == 40 else file.read_text(encoding="utf-8"))
    assert all(len(piece.encode()) <= 202 for piece in pieces)


def test_the_length_is_at_most_the_models(model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(counting(300))
    (tokens,) = read_calibration(file, tokenizer_directory=model, samples=1)
    assert tokens.shape == (1, 64)
    with pytest.raises(ValueError, match="takes at most 64 tokens at a time, not 65"):
        read_calibration(file, tokenizer_directory=model, samples=1, sequence_length=65)
    with pytest.raises(ValueError, match="a sequence of 1 tokens has no room for text beside the tokenizer's own 1"):
        read_calibration(file, tokenizer_directory=model, samples=1, sequence_length=1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 131072}, 131072),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_how_long_a_sequence_may_be(config, expected):
    assert longest_sequence(config) == expected


@pytest.mark.parametrize(("limit", "expected"), [(32, 32), (32.0, 32), (10**30, None), ([9], None), (0.5, None)])
def test_a_tokenizers_own_limit_may_be_anything(limit, expected):
    assert longest_sequence({}, SimpleNamespace(model_max_length=limit)) == expected


def test_the_tokenizers_own_limit_counts(tmp_path):
    folder = build(
        tmp_path / "short", config={"max_position_embeddings": 9999}, tokenizer_config={"model_max_length": 32}
    )
    (tmp_path / "text.txt").write_text(counting(100))
    (tokens,) = read_calibration(tmp_path / "text.txt", tokenizer_directory=folder, samples=1)
    assert tokens.shape == (1, 32)
    build(folder, config={"max_position_embeddings": 131072})
    (tmp_path / "text.txt").write_text(counting(3000))
    (tokens,) = read_calibration(tmp_path / "text.txt", tokenizer_directory=folder, samples=1)
    assert tokens.shape == (1, 2048)


def test_a_tokenizer_without_special_tokens(plain, tmp_path):
    file = lines(tmp_path / "text.jsonl", 4, 10)
    found = read_calibration(file, tokenizer_directory=plain, samples=1, sequence_length=40)
    assert sorted(found[0][0].tolist()) == sorted(FIRST + 12 * at + word for at in range(4) for word in range(10))


# ---- not text -------------------------------------------------------------------------------------------------------


def test_batches_are_taken_as_they_are(model):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    given_batches = [
        [3, 4, 5],
        [[3, 4], [5, 6]],
        torch.tensor([7, 8], dtype=torch.int32),
        {"input_ids": torch.tensor([[3, 4, 0], [3, 4, 5]]), "attention_mask": mask, "labels": None},
        {"input_ids": [1, 2], "attention_mask": [1, 0]},
        [9],
    ]
    found = read_calibration(iter(given_batches), tokenizer_directory=model, samples=7)
    assert [each.tolist() for each in found[:3]] == [[[3, 4, 5]], [[3, 4], [5, 6]], [[7, 8]]]
    assert found[2].dtype == torch.int64
    assert torch.equal(found[3]["attention_mask"], mask)
    assert found[3]["labels"] is None
    assert found[4]["attention_mask"].tolist() == [[1, 0]]
    assert len(found) == 5, "seven sequences are enough"


def test_random_tokens_are_asked_for_by_name(model):
    with pytest.warns(UserWarning, match="random tokens are no language"):
        found = read_calibration("random", tokenizer_directory=model, samples=3, sequence_length=50)
    assert [tokens.shape for tokens in found] == [(1, 50)] * 3
    assert all(0 <= token < 503 for tokens in found for token in tokens[0].tolist())
    assert len({token for tokens in found for token in tokens[0].tolist()}) > 50


@pytest.mark.parametrize("count", [1, 8, 9, 17, 18, 26, 27])
@pytest.mark.parametrize("form", ["text", "documents"])
def test_a_short_text_is_used_as_far_as_it_goes(model, tmp_path, form, count):
    """Whole sequences of 10 with 9 tokens of text each, and one shorter one where there is none."""
    (tmp_path / "a.txt").write_text(counting(count))
    source, own = (tmp_path / "a.txt", 0) if form == "text" else ([counting(count)], 1)  # the end of a document
    whole = (count + own) // 9
    if whole >= 3:
        found = read_calibration(source, tokenizer_directory=model, samples=3, sequence_length=10)
    else:
        used = f"{whole} sequences? of 10" if whole else f"1 sequence of {count + own + 1}"
        with pytest.warns(UserWarning, match=f"is short: calibrating with {used} tokens, not 3 of 10") as said:
            found = read_calibration(source, tokenizer_directory=model, samples=3, sequence_length=10)
        assert len(said) == 1
        assert "\n" not in str(said[0].message)
        assert said[0].filename == __file__
    assert [tuple(tokens.shape) for tokens in found] == [(1, 10)] * min(whole, 3) or [(1, count + own + 1)]
    read = torch.cat([tokens[0, 1:] for tokens in found]).tolist()
    assert len(set(read)) == len(read), "no token is used twice"


@pytest.mark.parametrize(("known", "share"), [(3, None), (2, "60%"), (0, "100%")])
def test_a_text_that_the_tokenizer_does_not_know_is_told(tmp_path, known, share):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    (tmp_path / "a.txt").write_text(" ".join((["hedge"] * known + ["今天"] * (5 - known)) * 20))
    read = functools.partial(read_calibration, tokenizer_directory=tmp_path, samples=2, sequence_length=10)
    if share is None:
        read(tmp_path / "a.txt")
        return
    with pytest.warns(UserWarning, match=rf"a\.txt: {share} of its tokens are <unk>, which stands for") as said:
        read(tmp_path / "a.txt")
    assert said[0].filename == __file__


def _file(name, content):
    def make(folder):
        path = folder / name
        path.write_bytes(content)
        return path

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_file("a.txt", b""), "a.txt has no tokens: there is nothing to calibrate with"),
        (_file("a.jsonl", b'{"text": ""}'), "a.jsonl has no tokens: there is nothing to calibrate with"),
        (lambda folder: folder / "none.txt", "none.txt: no such file; give a .txt, .jsonl or .json file, or 'random'"),
        (lambda folder: folder, "has no preprocessor_config.json"),
        (_file("a.parquet", b"PAR1"), r"read from .txt, .jsonl and .json, not from .parquet"),
        (_file("a.txt", "w1 w2".encode("utf-16")), "UTF-16 text; save it as UTF-8"),
        (_file("a.txt", "w1 w2".encode("utf-16-le")), "full of NUL near byte 0, as UTF-16 and UTF-32 are"),
        (_file("a.txt", b"w1 \xff\xfe\xfa w2"), "not UTF-8 text near byte 3"),
        (_file("a.jsonl", b'{"text": "w1"}\n{"text": '), "a.jsonl, the line at byte 15: not a JSON record"),
        (_file("a.jsonl", b'{"text": "w1"}\n\xff\n'), "the line at byte 15: not a JSON record"),
        (_file("a.jsonl", b"[" * 50_000), "the line at byte 0: not a JSON record"),
        (_file("a.jsonl", b'{"content": "w1", "id": 3}'), "no text in the field 'text'; .* There are: content, id"),
        (_file("a.jsonl", b'{"text": 3}'), "no text in the field 'text'"),
        (_file("a.jsonl", b"3\n"), "the line at byte 0: not a record or a string"),
        (_file("a.json", b"[1]"), "record 0: not a record or a string"),
        (_file("a.json", b'["w1", '), "a.json: damaged: not valid JSON in or behind record 1"),
        (_file("a.json", b'["w1" "w2"]'), "a.json: damaged: not valid JSON in or behind record 1"),
        (_file("a.json", b'["w1", ' + b"[" * 50_000), "a.json: damaged: not valid JSON in or behind record 1"),
        (_file("a.json", b" [ ] "), "a.json has no tokens"),
        (lambda _: [], "the calibration data is empty"),
        (lambda _: {"input_ids": [1]}, "a single batch; pass a list of batches"),
        (lambda _: [""], "the list of documents has no tokens"),
        (lambda _: ["w1", 3], "document 1: not a record or a string"),
        (lambda _: [{"ids": [1]}], r"batch 0: a mapping without 'input_ids': \['ids'\]"),
        (lambda _: [[1], [[1, 2], [3]]], "batch 1: not tokens .*rows of one batch must be equally long"),
        (lambda _: [[0.5]], "batch 0: tokens are integers, not torch.float32"),
        (
            lambda _: [torch.zeros(1, 2, 3, dtype=torch.int64)],
            r"have shape \(sequences, length\) or \(length,\), not \(1, 2, 3\)",
        ),
        (lambda _: [torch.zeros(1, 0, dtype=torch.int64)], r"not \(1, 0\)"),
        (
            lambda _: [[1, 503]],
            "batch 0 gives token 503, but the model has a vocabulary of 503: the tokenizer is another",
        ),
        (lambda _: [[1, -100]], "batch 0: -100 is no token; pad with the padding token and a mask"),
        (
            lambda _: [{"input_ids": [1, 2], "attention_mask": [1]}],
            r"an attention_mask of shape \(1, 1\) for tokens \(1, 2\)",
        ),
        (lambda _: [{"input_ids": [1, 2], "attention_mask": [0, 0]}], "the attention_mask calls all tokens padding"),
    ],
)
def test_errors(model, tmp_path, make, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_calibration(make(tmp_path), tokenizer_directory=model, samples=2, sequence_length=10)
    assert "\n" not in str(caught.value)


def test_of_an_array_little_more_than_a_record_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 32)
    texts = ["w1 ] , [", '\u00e9 "' * 30, "", "w2"]
    (tmp_path / "a.json").write_text("\ufeff \n" + json.dumps([{"text": each} for each in texts], indent=1) + "\n")
    assert [*documents.read_documents(tmp_path / "a.json")] == texts
    (tmp_path / "a.json").write_text(json.dumps(texts[:2])[:-1] + ", no JSON")
    read = documents.read_documents(tmp_path / "a.json")
    assert [next(read), next(read)] == texts[:2]
    with pytest.raises(ValueError, match="in or behind record 2"):
        next(read)


def test_other_errors(model, tmp_path):
    with pytest.raises(ValueError, match="samples must be at least 1, not 0"):
        read_calibration(["w1"], tokenizer_directory=model, samples=0)
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        read_calibration(["w1"], tokenizer_directory=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no tokenizer that transformers can load without code") as caught:
        read_calibration(["w1"], tokenizer_directory=tmp_path / "empty")
    assert "\n" not in str(caught.value)
    odd = build(tmp_path / "odd", tokenizer_config={"model_max_length": "x"})
    with pytest.raises(CheckpointError, match=r"odd: no tokenizer .* \('>' not supported between instances of"):
        read_calibration(["w1"], tokenizer_directory=odd)
    unknown = build(tmp_path / "unknown")
    path = unknown / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": ""}))  # which is unknown itself
    with pytest.raises(CheckpointError, match="unknown: no tokenizer"):
        read_calibration(["w1"], tokenizer_directory=unknown)
    lacking = build(tmp_path / "lacking", special=False)
    values = json.loads((lacking / "tokenizer.json").read_text())
    values["model"]["vocab"] = {"a": 0, "w1": 1}  # and no word for others
    (lacking / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="the tokenizer does not take a text: WordLevel error"):
        read_calibration(["w1 w2"], tokenizer_directory=lacking)
    wrong = build(tmp_path / "wrong", config={"vocab_size": 100})
    with pytest.raises(
        ValueError, match=r"the tokenizer in .*wrong gives token .*, but the model has a vocabulary of 100"
    ):
        read_calibration([counting(400)], tokenizer_directory=wrong, samples=2, sequence_length=10)


def test_another_field(model, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": counting(50), "text": 3}))
    found = read_calibration(
        tmp_path / "a.jsonl", tokenizer_directory=model, samples=2, sequence_length=10, field="content"
    )
    assert all(is_run(tokens[0, 1:].tolist()) for tokens in found)


def test_half_a_surrogate_pair(model, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": counting(50)}) + '\n{"text": "\\ud800 w1 w2"}\n')
    assert read_calibration(tmp_path / "a.jsonl", tokenizer_directory=model, samples=5, sequence_length=11)


def test_text_of_huge_words_is_read_on(model, tmp_path, monkeypatch):
    """Where a place gives too few tokens, the file is read from its beginning."""
    monkeypatch.setattr(calibration, "_SPARSE", 6)
    (tmp_path / "a.txt").write_text("x" * 3000 + " " + counting(200))
    found = read_calibration(tmp_path / "a.txt", tokenizer_directory=model, samples=3, sequence_length=10)
    assert len(found) == 3
    lines(tmp_path / "a.jsonl", 12, 2, padding="x" * 400)  # more bytes than it seems, and few tokens
    found = read_calibration(tmp_path / "a.jsonl", tokenizer_directory=model, samples=3, sequence_length=11)
    assert len(found) == 3


# ---- several texts --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    (tmp_path / "a.txt").write_text(counting(300))
    (tmp_path / "b.txt").write_text(" ".join(reversed(WORDS[:300])))
    return tmp_path


def test_texts_with_names_share_the_sequences_by_their_weights(two, model):
    how = {"tokenizer_directory": model, "samples": 12, "sequence_length": 10}
    found = read_calibration({"up:3": two / "a.txt", "down": two / "b.txt"}, **how)
    assert {name: len(its) for name, its in found.by_name().items()} == {"up": 9, "down": 3}
    for tokens, name in zip(found, found.names, strict=True):
        assert is_run(tokens[0, 1:].tolist() if name == "up" else tokens[0, 1:].flip(0).tolist())
    again = read_calibration(f"up:3={two / 'a.txt'},down={two / 'b.txt'}", **how)
    assert again.names == found.names
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("code=,maths=b.txt", "write NAME=FILE,NAME=FILE"),
        ({"code:-1": "a.txt"}, "write a positive number"),
        ({"code:much": "a.txt"}, "'much' is no weight; write NAME:2"),
    ],
)
def test_texts_that_are_none_are_refused(source, said, model):
    with pytest.raises(ValueError, match=said):
        read_calibration(source, tokenizer_directory=model)


# ---- pictures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sees(tmp_path):
    """The directory of a model of pictures of 8 × 8, of which only what is read here is there, and pictures."""
    from PIL import Image

    (tmp_path / "model").mkdir()
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "do_resize": True}
    processor |= {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "vit", "dtype": "bfloat16"}))
    (tmp_path / "seen" / "more").mkdir(parents=True)
    for at, (name, mode) in enumerate(
        (("a.png", "RGB"), ("b.JPG", "L"), ("more/c.png", "RGBA"), ("more/d.bmp", "RGB"))
    ):
        channels = len(Image.new(mode, (1, 1)).getbands())
        colour = (51 * at,) * channels if channels > 1 else 51 * at
        Image.new(mode, (12, 9), colour).save(tmp_path / "seen" / name)
    (tmp_path / "seen" / "notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_of_pictures_is_prepared_as_the_directory_says(sees):
    found = read_calibration(sees / "seen", tokenizer_directory=sees / "model", samples=4)
    assert all({*each} == {"pixel_values"} and each["pixel_values"].shape == (1, 3, 8, 8) for each in found)
    assert {each["pixel_values"].dtype for each in found} == {torch.bfloat16}
    means = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.25, 0.2])
    expected = {round(51 * at / 255, 3): (51 * at / 255 - means[0]) / means[1] for at in range(4)}
    got = sorted((each["pixel_values"][0, :, 4, 4].float() for each in found), key=lambda each: float(each[0]))
    for mine, wanted in zip(got, expected.values(), strict=True):
        torch.testing.assert_close(mine, wanted, atol=0.02, rtol=0.01)


def test_which_pictures_follows_from_the_seed_and_too_few_are_said(sees):
    def read(**how):
        return [
            each["pixel_values"] for each in read_calibration(sees / "seen", tokenizer_directory=sees / "model", **how)
        ]

    assert all(torch.equal(a, b) for a, b in zip(read(samples=3, seed=1), read(samples=3, seed=1), strict=True))
    firsts = {float(read(samples=1, seed=seed)[0].mean()) for seed in range(9)}
    assert len(firsts) > 1
    with pytest.warns(UserWarning, match="seen is short: calibrating with 4 pictures, not 5"):
        assert len(read(samples=5)) == 4


def test_what_is_no_picture_and_what_prepares_none_is_said(sees):
    (sees / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: holds no pictures \(\.bmp, "):
        read_calibration(sees / "empty", tokenizer_directory=sees / "model")
    (sees / "seen" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    with pytest.raises(ValueError, match=r"broken\.png: cannot be read as a picture of the model's \("):
        read_calibration(sees / "seen", tokenizer_directory=sees / "model", samples=5)
    (sees / "model" / "preprocessor_config.json").write_text('{"image_processor_type": "Nothing"}')
    with pytest.raises(
        CheckpointError, match=r"config\.json: what is beside it does not say how pictures are prepared"
    ):
        read_calibration(sees / "seen", tokenizer_directory=sees / "model")
    (sees / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model: has no preprocessor_config\.json, which says"):
        read_calibration(sees / "seen", tokenizer_directory=sees / "model")
    with pytest.raises(ValueError, match="Linear does not say which pictures it takes, as models of timm do"):
        read_pictures(sees / "seen", torch.nn.Linear(2, 2))
