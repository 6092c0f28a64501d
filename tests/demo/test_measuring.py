"""What is measured of a network: sizes, work and time."""

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
        if run.method == "channels (shrink)":
            continue
        assert run.bytes == dense.bytes  # zeros take as much room
        assert run.zipped is not None
        assert run.zipped <= run.bytes
        assert (run.latency_ms is not None) == (run.seed == 0)
        if run.sparsity > 0.8:
            assert run.zipped < dense.zipped / 3
