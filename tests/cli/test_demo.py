"""``secateur demo`` passes on what it is asked, and lists its methods."""

import secateur.demo
from support.commands import fails, run


def test_demo_is_passed_on(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(secateur.demo, "run_demo", lambda out, **settings: called.append((out, settings)))
    assert run("demo").exit_code == 0
    assert run("demo", "--out", tmp_path / "page").exit_code == 0
    assert run("demo", "--method", "lamp,erk", "--method", "2:4").exit_code == 0
    assert called == [
        (None, {"methods": None}),
        (tmp_path / "page", {"methods": None}),
        (None, {"methods": ["lamp,erk", "2:4"]}),
    ]


def test_demo_lists_its_methods(monkeypatch):
    monkeypatch.setattr(secateur.demo, "run_demo", None)  # nothing runs
    result = run("demo", "--method", "list")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(secateur.demo.METHODS)
    assert all(len(line) <= 100 for line in lines)
    assert run("demo", "--method", "lamp,list").stdout == result.stdout


def test_demo_refuses_an_unknown_method(tmp_path):
    fails(
        run("demo", "--method", "lamp,lam", "--out", tmp_path / "page"), "no method 'lam'; there are magnitude, erk, "
    )
    assert not list(tmp_path.iterdir())


def test_demo_without_its_extras(monkeypatch):
    def fail(_, **settings):
        raise ModuleNotFoundError("No module named 'sklearn'; pip install 'secateur[demo]'.")

    monkeypatch.setattr(secateur.demo, "run_demo", fail)
    fails(run("demo"), r"secateur\[demo\]")
