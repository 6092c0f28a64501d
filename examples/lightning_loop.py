"""Prune while training in Lightning: python examples/lightning_loop.py [--quick]

A dense network for handwritten digits is trained; a copy of it is trained on with 90 % of its weights leaving, another
with none: both have the same number of epochs. About ten seconds.
"""

import argparse
import copy
import logging
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn

from secateur import sparsity_of
from secateur.integrations.lightning import Pruning

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="fewer epochs")
epochs = 4 if parser.parse_args().quick else 12

pixels, classes = load_digits(return_X_y=True)
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
inputs, labels = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]
train = torch.utils.data.TensorDataset(inputs[:1200], labels[:1200])


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, _):
        pixels, wanted = batch
        return nn.functional.cross_entropy(self.net(pixels), wanted)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(module, *callbacks):
    shown = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], **shown)
    trainer.fit(module, torch.utils.data.DataLoader(train, batch_size=60, shuffle=True))


def tell(name, module):
    module.eval()
    with torch.no_grad():
        right = (module.net(inputs[1200:]).argmax(1) == labels[1200:]).double().mean().item()
    module.train()
    print(f"{name:<22} {sparsity_of(module):>6.1%} {right:>12.1%}")


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # the table is enough
warnings.filterwarnings("ignore", module="lightning")
torch.manual_seed(0)
print(f"{'':<22} {'zeros':>6} {'test images':>12}")
dense = Digits()
fit(dense)
tell("dense", dense)

longer = copy.deepcopy(dense)
fit(longer)
tell("trained on, dense", longer)

pruned = copy.deepcopy(dense)
fit(pruned, Pruning(0.9, verbose=False))
tell("trained on, pruned", pruned)
