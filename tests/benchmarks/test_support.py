"""What benchmarks share: calls take turns, ratios are those of rounds, and a process that fails says why."""

import pytest

from benchmarks.support import timing
from benchmarks.support.processes import in_a_process
from benchmarks.support.tables import head, row, spread
from benchmarks.support.timing import alternating, ratio


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a call says so; what was called, in order."""

    class Clock:
        now = 0.0

        def __init__(self):
            self.called = []

        def taking(self, name, *seconds):
            durations = iter(seconds)

            def call():
                self.called.append(name)
                self.now += next(durations)

            return call

    found = Clock()
    monkeypatch.setattr(timing, "CLOCKS", {"wall": lambda: found.now, "cpu": lambda: found.now})
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: found.called.append(f"sleep {seconds}"))
    return found


def test_calls_take_turns_and_the_first_round_does_not_count(clock):
    calls = {"a": clock.taking("a", 9, 1, 2), "b": clock.taking("b", 9, 3, 4)}
    assert alternating(calls, 2) == {"a": [1, 2], "b": [3, 4]}
    assert "".join(clock.called) == "ababab"


def test_a_turn_is_the_mean_of_its_calls_or_their_median(clock):
    assert alternating({"a": clock.taking("a", 1, 2, 6)}, 1, warm_up=0, repeats=3) == {"a": [3]}
    assert alternating({"a": clock.taking("a", 1, 2, 6)}, 1, warm_up=0, repeats=3, middle=True) == {"a": [2]}
    assert alternating({"a": clock.taking("a", 1, 2, 3, 6)}, 1, warm_up=0, at_least=5) == {"a": [2]}
    calls = {"a": clock.taking("a", 1), "b": clock.taking("b", 2, 4)}
    assert alternating(calls, 1, warm_up=0, repeats={"a": 1, "b": 2}) == {"a": [1], "b": [3]}


def test_rounds_begin_with_another_where_asked(clock):
    calls = {name: clock.taking(name, *[1] * 4) for name in "abc"}
    alternating(calls, 3, rotate=True)
    assert "".join(clock.called) == "cab" + "abc" + "bca" + "cab"


def test_a_call_settles_before_it_counts(clock):
    assert alternating({"a": clock.taking("a", 3, 3, 1)}, 1, warm_up=0, settle=5) == {"a": [1]}
    assert clock.called == ["sleep 0.02", "a", "a", "a"]


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    assert ratio([1.0, 2.0, 10.0], [2.0, 8.0, 10.0]) == 2.0


def test_a_process_says_its_last_line_or_why_it_failed(tmp_path):
    file = tmp_path / "child.py"
    file.write_text(
        "import json, os, sys\nprint('on the way')\nprint(json.dumps([sys.argv[1:], os.environ['WORD']]))\n"
    )
    assert in_a_process("a child", str(file), "one", "two", environment={"WORD": "here"}) == [["one", "two"], "here"]
    file.write_text("raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match=r"^a child failed:\nno such thing"):
        in_a_process("a child", str(file))
    file.write_text("")
    with pytest.raises(RuntimeError, match=r"^a child failed:"):
        in_a_process("a child", str(file))


def test_tables_are_markdown():
    assert head(["", "ms"]) == "|  | ms |\n| --- | --- |"
    assert row(["a", "1"]) == "| a | 1 |"
    assert spread([1.0, 3.0], 1) == "2.0 ± 1.4"
    assert spread([1.0]) == "1.0000"
