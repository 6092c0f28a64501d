"""What the machine is called."""

from pathlib import Path

from secateur.support import processor


def test_it_is_what_the_system_says(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_named: "cores : 4\nmodel name\t: A processor \nx: y\n")
    assert processor() == "A processor"
