"""The whole story in minutes: train, prune and shrink a small network; report."""

from secateur.demo.running import run_demo as run_demo
from secateur.demo.trials import EPOCHS as EPOCHS
from secateur.demo.trials import METHODS as METHODS
from secateur.demo.trials import RATE as RATE
from secateur.demo.trials import TUNING_EPOCHS as TUNING_EPOCHS
from secateur.demo.trials import Digits as Digits
from secateur.demo.trials import DigitsNet as DigitsNet
from secateur.demo.trials import load_digits as load_digits
from secateur.demo.trials import train as train
