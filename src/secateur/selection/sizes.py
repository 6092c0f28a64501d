"""How much is looked at at a time: read as ``sizes.PIECE`` wherever it is used, so that a test can change it for all.

Law: no result depends on these.
"""

__all__ = [
    "AT_ONCE",
    "COLLECTED",
    "DEVICE_SEGMENT",
    "PIECE",
    "ROUNDS",
    "SAMPLE",
    "SEGMENT",
    "STANDARD_DEVIATIONS",
]

# A piece is just below ATen's grain of 32768 elements: its operations run without an OpenMP barrier (which costs
# milliseconds on a busy machine), its buffers stay in the L2 cache, and whole segments go to threads instead.
PIECE = (1 << 15) - 64
SEGMENT = PIECE * 64  # 2 M entries: what one thread works through at a time
DEVICE_SEGMENT = 1 << 24  # on an accelerator: few launches, bounded buffers
SAMPLE = 1 << 18  # entries sampled to bracket the threshold
AT_ONCE = 1 << 19  # entries of models that are ranked in one piece
COLLECTED = 1 << 22  # entries that may lie inside the bracket before the search turns to counting digits
ROUNDS = 4  # brackets that are tried before digits
STANDARD_DEVIATIONS = 3  # half width of the bracket; a miss costs a second search, never a wrong answer
