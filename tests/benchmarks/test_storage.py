"""Every verb is given what nobody meant; it refuses it, or does no harm."""

import pytest

from benchmarks.storage import hostile


@pytest.mark.parametrize(
    ("kind", "verbs"),
    [("files", ["inspect", "text", "prune"]), ("disk", ["prune"]), ("together", ["prune"]), ("killed", ["compress"])],
)
@pytest.mark.filterwarnings("ignore")
def test_hostile_files_end_in_a_refusal_or_do_no_harm(tmp_path, kind, verbs):
    found = [*hostile.counted(tmp_path, kind, verbs, range(4))]
    assert {each["verb"] for each in found} == {*verbs}
    assert not any("crashed" in each for each in found), found


@pytest.mark.filterwarnings("ignore")
def test_hostile_arguments_are_refused_or_do_no_harm(tmp_path):
    (found,) = hostile.counted(tmp_path, "arguments", ["prune"], range(40))
    assert "crashed" not in found
    assert found["refused"] > 10
