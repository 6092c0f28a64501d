"""What the machine is called."""

from pathlib import Path

from secateur.support import processor


def test_where_the_system_does_not_say_it_is_unknown(monkeypatch):
    def missing(*_args, **_named):
        raise OSError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.processor", lambda: "")
    assert processor() == "unknown"


def test_it_is_what_the_system_says(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_named: "cores : 4\nmodel name\t: A processor \nx: y\n")
    assert processor() == "A processor"
