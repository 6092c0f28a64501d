'''Proves what a pruned checkpoint claims of itself: `verify_checkpoint` reads its ``secateur.json`` and every tensor.

Law: what the record claims is counted on the stored bytes, never believed; nothing larger than one tensor's zeros is
held; whatever is wrong with a file is a problem that is named, or a `CheckpointError` of one line.

The record that is verified, ``secateur.json`` beside the weights. Other keys are ignored::

    {
      "secateur": "0.1.0",
      "method": "oneshot",             # "sparsify": kept weights are the source's. Any other: they may have changed.
                                       # Left out: as sparsify
      "pattern": "2:4",                # a word of `secateur.patterns.parse`, or the repr of one of the library's patterns,
                                       # such as "NM(n=2, m=4, axis=1)"; null or left out: none is claimed
      "pruned": {"a.weight": 0.5},     # the fraction of zeros among the stored values of each tensor whose bytes changed:
                                       # float(zeros / numel), from which the exact count follows
      "removed": {"a.weight": 512},    # how many entries its mask removes, kept zeros not counted; for a name of "pruned",
                                       # needed to check rows, blocks and channels; leave a name out if its parts
                                       # (experts, q/k/v) were given different sparsities
      "left_alone": {"why": ["b"]},    # the names of all other tensors
      "sparsity": {"targets": 0.5,     # of all pruned tensors together
                   "model": 0.4}       # of all tensors whose dtype torch reads
    }
'''
