"""What zeros are worth at inference: kernels beside the best dense product and their floors, and whole models.

    python benchmarks/inference/run.py kernels [--threads 1,2] [--batches 1,16,256] [--rounds 9] [--clock wall|cpu]
    python benchmarks/inference/run.py int8 [--threads 1,2] [--batches 1,16,256] [--rounds 9] [--clock wall|cpu]
    python benchmarks/inference/run.py threads [--batches 1,16,256] [--rounds 9]
    python benchmarks/inference/run.py models [--threads 1,2] [--only mlp,llama] [--minilm DIR] [--cache DIR]
    python benchmarks/inference/run.py convolutions [--threads 1] [--parts layers,sums,whole,digits] [--outputs 1,4]
                                                   [--models resnet,mobilenet,detector] [--images 1,16]
                                                   [--channels-last]
    python benchmarks/inference/run.py trained [--scene-size 128] [--scene-steps 400,600] [--rounds 9] [--cache DIR]
    python benchmarks/inference/run.py onnx [--threads 1,2] [--batches 1,16,256] [--rounds 9] [--clock wall|cpu]
    python benchmarks/inference/run.py verbs --minilm DIR [--rounds 9] [--clock wall|cpu] [--cache DIR]

Law: everything that is compared runs in one process, alternating, and a ratio is the median of the rounds' ratios. On a
busy machine ``--clock cpu`` with one thread is steadier.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.inference.convolutions import bench_convolutions
from benchmarks.inference.int8_layers import bench_int8
from benchmarks.inference.onnx_layers import bench_onnx
from benchmarks.inference.products import bench_kernels, bench_threads
from benchmarks.inference.trained import bench_trained
from benchmarks.inference.verbs import bench_verbs
from benchmarks.inference.whole_models import bench_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--only", default="*", help="which models: mlp, cnn, bottlenecks, minilm, llama; globs, commas")
    parser.add_argument("--minilm", type=Path, help="the folder of all-MiniLM-L6-v2; left out without")
    parser.add_argument("--cache", type=Path, default=Path("inference-cache"), help="trained and pruned models")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["layers", "sums", "whole", "digits"])
    parser.add_argument("--without-compiling", action="store_true", help="of whole networks leave torch.compile out")
    parser.add_argument("--images", type=numbers, default=[1, 16], help="batches of the networks of convolutions")
    parser.add_argument(
        "--outputs", type=numbers, default=[1, 4], help="that share the places of a convolution's zeros"
    )
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["resnet"], help="whole: resnet, mobilenet, detector"
    )
    parser.add_argument("--channels-last", action="store_true", help="whole: also pack what came in channels_last")
    parser.add_argument("--depths", type=numbers, default=[18, 50], help="of ResNets")
    parser.add_argument("--gpt-steps", type=int, default=500)
    parser.add_argument("--scene-steps", type=numbers, default=[400, 600], help="trained: of training, of fine-tuning")
    parser.add_argument("--scene-size", type=int, default=128, help="trained: pixels of an image each way")
    parser.add_argument("--repair-steps", type=int, default=200)
    parser.add_argument(
        "--sparsities", type=lambda text: [float(word) for word in text.split(",")], default=[0.9, 0.95]
    )
    options = parser.parse_args()
    COMMANDS[options.what](options)


COMMANDS = {
    "kernels": bench_kernels,
    "int8": bench_int8,
    "threads": bench_threads,
    "convolutions": bench_convolutions,
    "trained": bench_trained,
    "models": bench_models,
    "onnx": bench_onnx,
    "verbs": bench_verbs,
}

if __name__ == "__main__":
    main()
