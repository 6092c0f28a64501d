"""Work in threads: in order, not too far ahead, and an error of a part is the caller's."""

import pytest

from secateur.selection import in_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_and_few_parts_are_taken_ahead(threads):
    taken = []

    def parts():
        for part in range(20):
            taken.append(part)
            yield part

    for done, result in enumerate(in_threads(lambda part: part * part, parts(), threads)):
        assert result == done * done
        assert len(taken) <= done + 1 + threads


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_part_raises_is_raised(threads):
    def work(part):
        if part == 2:
            raise ValueError("part 2")
        return part

    found = in_threads(work, range(10), threads)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="part 2"):
        next(found)
