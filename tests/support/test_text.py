"""Words and numbers for people: nothing of a file reaches a terminal as it is; 0% and 100% are said where true."""

from secateur.support import bytes_text, percent, percents, printable


def test_printable_shows_control_characters_and_cuts():
    assert printable("a\x1b[31m\n\u202e") == "a\\x1b[31m\\n\\u202e"
    assert len(printable("x" * 1000)) == 203


def test_sizes_have_three_digits_and_a_unit():
    sizes = [0, 999, 1000, 999_400, 1_234_567, 2 * 10**9, 5 * 10**12]
    assert [bytes_text(size) for size in sizes] == ["0 B", "999 B", "1 kB", "999 kB", "1.23 MB", "2 GB", "5 TB"]


def test_shares_are_none_or_all_only_where_they_are():
    assert percent(1e-9) == "<0.1%"
    assert percent(1 - 1e-9) == ">99.9%"
    assert (percent(0), percent(1), percent(None)) == ("0%", "100%", "-")
    assert percents([0.25, None, 0.75], opaque=False) == "25.0% to 75.0%"
    assert percents([0.5, 0.5], opaque=False) == "50.0%"
    assert (percents([None], opaque=False), percents([0.5], opaque=True)) == ("-", "?")
