"""Text for people: names that came from files, bytes and shares.

Law: what is printed of a file holds no control character, and a share reads 0% or 100% only where it is.
"""

from __future__ import annotations

__all__ = ["bytes_text", "percent", "percents", "printable"]


def printable(text: str, limit: int = 200) -> str:
    r"""``text`` for one line of a terminal: control characters escaped, the middle of a long one cut out.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def bytes_text(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"


def percent(fraction: float | None) -> str:
    """A share that reads 0% or 100% only where it is.

    >>> [percent(share) for share in (0.0, 1e-6, 0.5, 0.99999, 1.0, None)]
    ['0%', '<0.1%', '50.0%', '>99.9%', '100%', '-']
    """
    if fraction is None:
        return "-"
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    if fraction < 0.001:
        return "<0.1%"
    return ">99.9%" if fraction > 0.999 else f"{fraction:.1%}"


def percents(fractions: list[float | None], *, opaque: bool) -> str:
    if opaque:
        return "?"
    known = [fraction for fraction in fractions if fraction is not None]
    if not known:
        return "-"
    low, high = percent(min(known)), percent(max(known))
    return low if low == high else f"{low} to {high}"
