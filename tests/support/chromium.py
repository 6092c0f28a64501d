"""Headless Chromium, where it is installed: what a page becomes in a browser."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")


in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def chromium(profile: Path, address: str, *options: str) -> str:
    """What headless Chromium prints for a page, without any network."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", *options, address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


def framed(page: Path, width: int, driver: str) -> Path:
    """A page that shows it so wide, though a window has to be wider, and has the title that a script in it gives it."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    text = text.replace("</body>", f"<script>{driver}</script></body>")
    inside = f'<iframe srcdoc="{html.escape(text)}" style="width: {width}px; height: 900px; border: 0"></iframe>'
    outside = page.with_name(f"{page.stem}-{width}.html")
    onload = "document.title = frames[0].document.title"
    outside.write_text(f'<!doctype html><title></title><body onload="{onload}">{inside}</body>', encoding="utf-8")
    return outside


def column(dom: str, table: str, index: int) -> list[str]:
    """The sort keys of a column of a table, in the order shown."""
    [body] = re.findall(rf'<table class="sortable[^"]*" id="{table}">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL)
    return [re.findall(r'data-value="([^"]*)"', row)[index] for row in body.split("</tr>")[:-1]]
