"""Every verb is given what nobody meant; it refuses it, or does no harm."""

import pytest

from benchmarks.storage import hostile, lines


@pytest.mark.parametrize(
    ("kind", "verbs"),
    [
        ("files", ["inspect", "text", "prune", "prices"]),
        ("disk", ["prune"]),
        ("together", ["prune"]),
        ("killed", ["compress"]),
        ("faults", ["pack", "save"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_hostile_files_end_in_a_refusal_or_do_no_harm(tmp_path, kind, verbs):
    found = [*hostile.counted(tmp_path, kind, verbs, range(4))]
    assert {each["verb"] for each in found} == {*verbs}
    assert not any("crashed" in each for each in found), found


@pytest.mark.filterwarnings("ignore")
def test_hostile_arguments_are_refused_or_do_no_harm(tmp_path):
    for verb in ("prune", "detach", "reached"):
        (found,) = hostile.counted(tmp_path, "arguments", [verb], range(40))
        assert "crashed" not in found
        assert found["refused"] > 10


@pytest.mark.parametrize("kind", lines.AROUND)
def test_a_line_that_is_not_too_long_is_read(kind):
    found = lines.main(kind, pieces=2)
    assert found["came"] == "2 batches"
    assert found["more GB"] < 0.5
