"""What is measured of a network: sizes, work, time, and which of its layers were packed."""

from secateur.report import Results


def test_multiply_adds_of_the_dense_network_by_hand(results: Results) -> None:
    stem, narrow, widening, wide, head = 64 * 16 * 9, 64 * 16 * 16 * 9, 16 * 32 * 16 * 9, 16 * 32 * 32 * 9, 32 * 10
    dense = stem + 2 * narrow + widening + 3 * wide + 16 * 32 * 16 + head
    for run in results.runs:
        assert run.multiply_adds is not None
        assert (run.multiply_adds == dense) == (run.method == "dense")
        if run.method == "2:4":
            assert run.multiply_adds == stem + (dense - stem) // 2


def test_sizes_and_times_are_measured_and_tell_the_truth(results: Results) -> None:
    dense = next(run for run in results.runs if run.method == "dense")
    assert dense.zipped is not None
    for run in results.runs:
        assert run.bytes == dense.bytes  # zeros take as much room
        assert run.zipped is not None
        assert run.zipped <= run.bytes
        assert (run.latency_ms is not None) == (run.seed == 0)
        if run.sparsity > 0.8:
            assert run.zipped < dense.zipped / 3


def test_packed_networks_are_the_masked_ones_in_other_layers(results: Results) -> None:
    """Accuracy and compressed file are the masked network's; bytes in memory and milliseconds are measured anew."""
    masked = {(run.method.partition(" (")[0], run.seed): run for run in results.shrunken if "(zeros)" in run.method}
    packed = [run for run in results.shrunken if run.method.endswith(", packed")]
    assert len(packed) == len(masked) == 4
    [dense, *_] = results.shrunken
    assert dense.memory is not None
    for run in packed:
        twin = masked[run.method.removesuffix(", packed"), run.seed]
        assert (run.sparsity, run.after, run.compressed) == (twin.sparsity, twin.after, twin.compressed)
        assert (run.memory is not None) == (run.batch_ms is not None) == (run.seed == 0)
        assert run.memory is None or run.memory <= dense.memory
        assert twin.memory == dense.memory  # zeros take as much room
        assert twin.compressed is not None
        assert twin.bytes is not None
        assert twin.compressed < 0.5 * twin.bytes
