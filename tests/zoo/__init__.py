"""The zoo: small models, written the way people write them, on which `shrink` is checked.

    from zoo import ZOO, names
    model, inputs = ZOO["resnet_basic"]()

Law: two builds of a name are bitwise equal, and building draws nothing from the generator of the caller.

`ZOO` maps a name to a factory without arguments. It returns the module, in eval mode and float32, and its example
inputs: a tensor, a tuple of positionals or a dict of keywords, of batch 2. `names("hand")` are plain `nn.Module` code,
`names("transformers")` are architectures of transformers from small configs, offline. A file holds a family; a new
model goes into the file of its family, a new file into `FAMILIES`.

Sizes differ on purpose (12, 20, 28, 36, three heads, seven tokens), so that no two dimensions are equal by accident;
the models `trap_*` do the opposite. Parameters that are initialized to a constant are drawn at random, and batch
normalizations hold the statistics of the example inputs, disturbed, so that a channel removed in the wrong place
changes the output. Parts of Mamba compute in float32 in a float64 model too.
"""

import importlib

from zoo.registry import ZOO, Inputs, hand, names, run, vector

__all__ = ["FAMILIES", "ZOO", "Inputs", "hand", "names", "run", "vector"]

FAMILIES = (  # the order of the models
    "convolutional",
    "detection",
    "mobile",
    "branches",
    "gates",
    "recurrent",
    "attention",
    "generative",
    "tables",
    "mixtures",
    "parameters",
    "activations",
    "outputs",
    "channels",
    "traps",
    "transformers_decoders",
    "transformers_mixtures",
    "transformers_encoders",
    "transformers_seq2seq",
    "transformers_vision",
    "transformers_multimodal",
    "transformers_audio",
)
for _family in FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
