"""What `oneshot` returns: numbers, and a table when it is printed."""

from secateur.models import Layer, OneShot

LAYERS = (
    Layer("a.weight", "a", (4, 6), 0.5, 0.25, 1200, 0.1),
    Layer("b.weight", "b", (2, 6), 0.25, None, 0, 0.1, (), ("damping was raised.",)),
    Layer("c.weight", "c", (2, 6), 0.0, None, 7, 0.1),
)


def test_it_prints_as_a_table_with_all_there_is_to_know():
    lines = str(OneShot(LAYERS, {"excluded": ("d.weight", "e.weight")}, 1.0)).splitlines()
    assert lines[0].split() == ["Layer", "Shape", "Removed", "Error", "Tokens"]
    assert lines[1].split() == ["a.weight", "4×6", "50.0%", "0.2500", "1,200"]
    assert lines[2].split() == ["b.weight", "2×6", "25.0%", "no", "tokens", "0"]
    assert lines[3].split() == ["c.weight", "2×6", "0%", "no", "relative", "error", "7"]
    assert lines[5].startswith("3 weights, 31.2% of their entries removed;")
    assert lines[6] == "Left alone, excluded: 2, such as d.weight."
    assert lines[7] == "Warning: b.weight: damping was raised."
