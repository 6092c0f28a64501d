"""What benchmarks share: calls take turns, ratios are those of rounds, and a process that fails says why."""

import pytest

from benchmarks.support.processes import in_a_process


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
