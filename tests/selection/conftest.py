"""The paths that scores go down."""

import pytest

from secateur.selection import bracket
from secateur.selection import sizes as at_a_time


@pytest.fixture(params=["plain", "sampled", "on a device"])
def path(request, monkeypatch):
    """Small tensors go down every path: with a sample and many segments, and as on an accelerator."""
    if request.param != "plain":
        monkeypatch.setattr(at_a_time, "AT_ONCE", 0)
        monkeypatch.setattr(at_a_time, "SAMPLE", 64)
        monkeypatch.setattr(at_a_time, "COLLECTED", 500)
        monkeypatch.setattr(at_a_time, "PIECE", 64)
        monkeypatch.setattr(at_a_time, "SEGMENT", 192)
    if request.param == "on a device":
        on_device = bracket._compare_on_device
        monkeypatch.setattr(bracket, "_compare_on_host", lambda *arguments: on_device(*arguments[:-1]))
        monkeypatch.setattr(at_a_time, "PIECE", 192)
    return request.param
