"""Jobs that are done side by side, a process each, until the time is over; each writes a row when it is done.

Law: a job follows from its name alone and starts when what it needs lies in the folder; the first in order goes first.
What has a row is not done again. A job that takes too long, or too much memory, is stopped, and its row says so.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.support.rows import add_row, read_rows


@dataclass(frozen=True)
class Job:
    """One detector in one form: a row.

    Attributes:
        order: what goes first.
        subject, seed: whose.
        method: "dense", or how it became smaller.
        level: the share of the multiply-adds that is to leave.
        epochs: of training after that; of "dense" none.
        seconds: a longer one is stopped.
        start: the method of the model that it trains on, if it is another.
    """

    order: tuple[float, ...] = field(compare=False)
    subject: str
    seed: int
    method: str
    level: float = 0.0
    epochs: int = 0
    seconds: float = 1e9
    start: str = ""

    @property
    def name(self) -> str:
        return f"{self.subject}-{self.seed}-{self.method}-{self.level:g}-{self.epochs}".replace(" ", "")

    @property
    def needs(self) -> str | None:
        """The name of the job whose model it begins with."""
        if self.method in ("dense", "narrower") and not self.epochs:
            return None
        start = Job(
            (), self.subject, self.seed, *(("dense",) if not self.epochs else (self.start or self.method, self.level))
        )
        return start.name

    def row(self) -> dict[str, Any]:
        told = asdict(self)
        del told["order"], told["seconds"], told["start"]
        return {"name": self.name, **told}


Work = Callable[[Job], dict[str, Any]]


def _worker(link: Connection, make: Callable[..., Work], given: tuple[Any, ...]) -> None:
    work = make(*given)
    while True:
        job: Job = link.recv()
        started = time.perf_counter()
        try:
            found = work(job)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()[-1500:]}
        link.send({**job.row(), **found, "wall": round(time.perf_counter() - started, 1)})


def _memory(process: int) -> float:
    """Gigabytes that a process holds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    return 0.0


def do(
    jobs: Iterable[Job],
    make: Callable[..., Work],
    given: tuple[Any, ...],
    *,
    rows: Path,
    slots: int,
    seconds: float,
    gigabytes: float,
) -> None:
    """What ``make(*given)`` of each process does with each job, until all are done or the time is over."""
    context = get_context("spawn")
    started = time.perf_counter()
    known = {row["name"]: row for row in read_rows(rows)}
    waiting = sorted((job for job in jobs if job.name not in known), key=lambda job: job.order)
    busy: dict[Connection, tuple[Any, Job | None, float]] = {}

    def begin() -> None:
        here, there = context.Pipe()
        process = context.Process(target=_worker, args=(there, make, given), daemon=True)
        process.start()
        there.close()
        busy[here] = (process, None, 0.0)

    def told(row: dict[str, Any]) -> None:
        add_row(rows, {**row, "at": round(time.perf_counter() - started, 1)})
        known[row["name"]] = row
        print(f"{row['at'] if 'at' in row else time.perf_counter() - started:7.1f} s  {row}", flush=True)

    def stopped(link: Connection, why: str) -> None:
        process, job, _ = busy.pop(link)
        process.kill()
        process.join()
        if job is not None:
            told({**job.row(), "failed": why})
        begin()

    for _ in range(slots):
        begin()
    while time.perf_counter() - started < seconds:
        for job in [each for each in waiting if "failed" in known.get(each.needs or "", ())]:
            waiting.remove(job)
        for link, (process, job, _) in list(busy.items()):
            ready = next((each for each in waiting if each.needs is None or each.needs in known), None)
            if job is None and ready is not None:
                waiting.remove(ready)
                link.send(ready)
                busy[link] = (process, ready, time.perf_counter())
        if not waiting and all(job is None for _, job, _ in busy.values()):
            break
        for link in wait(list(busy), timeout=0.5):
            assert isinstance(link, Connection)
            try:
                row = link.recv()
            except EOFError:
                stopped(link, "its process ended")
                continue
            busy[link] = (busy[link][0], None, 0.0)
            told(row)
        for link, (process, job, since) in list(busy.items()):
            if job is not None and time.perf_counter() - since > job.seconds:
                stopped(link, f"stopped after {job.seconds:.0f} s, with {_memory(process.pid):.1f} GB")
            elif (held := _memory(process.pid)) > gigabytes:
                stopped(link, f"stopped after {time.perf_counter() - since:.0f} s at {held:.1f} GB")
    for process, _, _ in busy.values():
        process.kill()
        process.join()
