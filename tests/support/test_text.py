"""Text for people: nothing that a file holds reaches the terminal, and a share reads 0% or 100% only where it is."""

from hypothesis import given
from hypothesis import strategies as st

from secateur.support import bytes_text, percent, percents, printable


@given(st.text(max_size=300), st.integers(10, 200))
def test_what_is_printed_holds_no_control_character(text, limit):
    assert printable(text, limit).isprintable()
    assert printable(printable(text, 10_000), 10**6) == printable(text, 10_000)


@given(st.text("abc", max_size=500), st.integers(10, 200))
def test_a_long_name_keeps_both_ends(name, limit):
    shown = printable(name, limit)
    assert len(shown) <= limit + 4
    if len(name) > limit:
        assert shown.startswith(name[: limit // 2])
        assert shown.endswith(name[-(limit // 2) :])
        assert "..." in shown
    else:
        assert shown == name


@given(st.floats(0, 1))
def test_a_share_reads_nothing_or_all_only_where_it_is(share):
    shown = percent(share)
    assert (shown == "0%") == (share == 0)
    assert (shown == "100%") == (share == 1)
    assert shown.endswith("%")


@given(st.integers(0, 10**16))
def test_bytes_have_three_digits_and_a_unit(count):
    number, unit = bytes_text(count).split()
    assert unit in ("B", "kB", "MB", "GB", "TB")
    assert abs(float(number) * 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit) - count) <= 0.005 * count


def test_shares_are_none_or_all_only_where_they_are():
    assert percent(1e-9) == "<0.1%"
    assert percent(1 - 1e-9) == ">99.9%"
    assert (percent(0), percent(1), percent(None)) == ("0%", "100%", "-")
    assert percents([0.25, None, 0.75], opaque=False) == "25.0% to 75.0%"
    assert percents([0.5, 0.5], opaque=False) == "50.0%"
    assert (percents([None], opaque=False), percents([0.5], opaque=True)) == ("-", "?")
