"""Prune while training with transformers' Trainer: python examples/trainer_loop.py [--quick]

A small BERT learns which module of Python a sentence of its documentation is about; then it is trained on while 80 % of
its weights leave, beside a copy that stays dense. About half a minute.
"""

import argparse
import copy
import pydoc
import random
import re
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from secateur import sparsity_of
from secateur.integrations.transformers import PruningCallback

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="fewer steps")
steps = 60 if parser.parse_args().quick else 250

MODULES = ["json", "random", "statistics", "threading", "email.message", "decimal"]
LENGTH = 16  # words of a sentence


def numbers(sentence):
    """A word is one of 998 numbers, by its letters; 0 pads."""
    found = [2 + (31 * sum(map(ord, word.lower())) + len(word)) % 998 for word in sentence.split()[:LENGTH]]
    return torch.tensor(found + [0] * (LENGTH - len(found)))


data = []
for label, module in enumerate(MODULES):
    text = pydoc.render_doc(module, renderer=pydoc.plaintext)
    for sentence in dict.fromkeys(re.findall(r"[A-Za-z][^.\n|]{30,200}", text)):  # each once
        tokens = numbers(sentence)
        data.append({"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.tensor(label)})
random.Random(0).shuffle(data)
train, unseen = data[:-200], data[-200:]


def fit(model, *callbacks):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=2e-3, use_cpu=True,
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=train, callbacks=[*callbacks])
        trainer.remove_callback(PrinterCallback)  # the table is enough
        trainer.train()


def tell(name, model):
    together = {key: torch.stack([row[key] for row in unseen]) for key in ("input_ids", "attention_mask")}
    wanted = torch.stack([row["labels"] for row in unseen])
    model.eval()
    with torch.no_grad():
        right = (model(**together).logits.argmax(1) == wanted).double().mean().item()
    print(f"{name:<20} {sparsity_of(model):>6.1%} {right:>17.1%}")


set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
dense = BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=len(MODULES), **sizes))
print(f"{'':<20} {'zeros':>6} {'unseen sentences':>17}")
fit(dense)
tell("dense", dense)

longer = copy.deepcopy(dense)
fit(longer)
tell("trained on, dense", longer)

pruned = copy.deepcopy(dense)
fit(pruned, PruningCallback(0.8, verbose=False))
tell("trained on, pruned", pruned)
