"""The benchmark of detectors: what is drawn, what waits for what, and what a table says. Ultralytics is not needed."""

import os
import time

import numpy as np

from benchmarks.detectors.jobs import Job, do
from benchmarks.detectors.run import DENSE, LEVELS, ONE, OURS, OWN, TAUGHT, THEIRS, jobs_of, tables
from benchmarks.detectors.scenes import CLASSES, SHAPES, draw_scenes, of_one_class, scene
from benchmarks.support.rows import read_rows


def test_a_scene_follows_from_its_split_and_number():
    first, found = scene("train", 3, 96)
    again, same = scene("train", 3, 96)
    other, _ = scene("val", 3, 96)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert [label for label, _ in found] == [label for label, _ in same]


def test_what_is_to_be_found_lies_in_the_picture():
    for number in range(20):
        picture, found = scene("train", number, 96)
        assert picture.size == (96, 96)
        assert len(found) <= SHAPES[1]
        for label, corners in found:
            assert 0 <= label < len(CLASSES)
            assert corners.min() >= 0
            assert corners.max() <= 96
            assert (np.ptp(corners, axis=0) >= 2).all()


def test_scenes_are_written_once_as_ultralytics_reads_them(tmp_path):
    told = draw_scenes(tmp_path, {"train": 2, "val": 1}, 64)
    lines = (tmp_path / "labels/train/00001.txt").read_text("utf-8").split("\n")
    values = np.array([float(each) for each in lines[0].split()[1:]])
    assert len(values) == 2 * len(list(CLASSES.values())[int(lines[0].split()[0])])
    assert ((values >= 0) & (values <= 1)).all()
    assert "val: images/val" in told.read_text("utf-8")
    (tmp_path / "images/train/00000.png").unlink()
    assert draw_scenes(tmp_path, {"train": 2, "val": 1}, 64) == told
    assert not (tmp_path / "images/train/00000.png").exists()


def test_scenes_of_one_class_have_it_as_the_first_and_are_judged_without_it_too(tmp_path):
    told = draw_scenes(tmp_path / "scenes", {"train": 8, "val": 4}, 64)
    folder = of_one_class(told, 3).parent
    has = {
        split: [bool([label for label, _ in scene(split, number, 64)[1] if label == 3]) for number in range(count)]
        for split, count in (("train", 8), ("val", 4))
    }
    assert 0 < sum(has["train"]) < 8
    assert len(list(folder.glob("images/train/*.png"))) == sum(has["train"])
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("labels/val/*.txt"))]
    assert [bool(text) for text in texts] == has["val"]
    assert {line.split()[0] for text in texts for line in text.splitlines()} <= {"0"}


def test_every_job_waits_for_one_that_is_there():
    jobs = list(jobs_of(["YOLO11n", "YOLOv8n-seg"], 2, True))
    names = {job.name for job in jobs}
    assert len(names) == len(jobs)
    assert {job.needs for job in jobs} - {None} <= names
    tuned = next(job for job in jobs if job.method == OURS and job.epochs)
    assert tuned.needs == f"{tuned.subject}-{tuned.seed}-shrink-{tuned.level:g}-0"
    assert {job.level for job in jobs if job.method == OURS} == {*LEVELS}
    assert {job.subject for job in jobs if job.method == ONE} == {"YOLO11n"}
    assert {job.needs for job in jobs if job.method == TAUGHT} == {
        job.name for job in jobs if job.name.endswith("dense-0-0")
    }
    starts = {job.name for job in jobs if job.method in (DENSE, OURS, THEIRS) and not job.epochs}
    assert {job.needs for job in jobs if job.method.endswith(OWN)} == starts


def _make(note):
    def work(job):
        if job.level == 0.1:
            raise ValueError("what is wrong")
        if job.level == 0.2:
            time.sleep(60)
        if job.level == 0.3:
            os._exit(1)
        with note.open("a") as file:
            file.write(f"{job.name}\n")
        return {"boxes": 0.5}

    return work


def test_jobs_write_rows_in_order_and_what_fails_says_how(tmp_path):
    rows, note = tmp_path / "rows.jsonl", tmp_path / "note"
    jobs = [
        Job((2,), "a", 0, "shrink", 0.4),
        Job((1,), "a", 0, "dense"),
        Job((3,), "a", 0, "shrink", 0.1),
        Job((3,), "a", 0, "shrink", 0.1, 5),
        Job((4,), "a", 0, "shrink", 0.2, seconds=0.2),
        Job((5,), "a", 0, "shrink", 0.3),
    ]
    told = {"rows": rows, "slots": 1, "seconds": 120.0, "gigabytes": 20.0}
    do(jobs, _make, (note,), **told)
    found = {row["name"]: row for row in read_rows(rows)}
    assert [*found] == ["a-0-dense-0-0", *(f"a-0-shrink-{level}-0" for level in (0.4, 0.1, 0.2, 0.3))]
    assert found["a-0-shrink-0.1-0"]["failed"] == "ValueError: what is wrong"
    assert found["a-0-shrink-0.2-0"]["failed"].startswith("stopped after 0 s")
    assert found["a-0-shrink-0.3-0"]["failed"] == "its process ended"
    do(jobs, _make, (note,), **told)  # what has a row is not done again
    assert len(read_rows(rows)) == len(found)
    assert note.read_text().split() == ["a-0-dense-0-0", "a-0-shrink-0.4-0"]


def test_a_table_has_means_over_seeds_beside_the_dense_of_the_same_seed():
    def row(seed, method, level, epochs, boxes, work):
        job = Job((), "YOLO11n", seed, method, level, epochs)
        return {**job.row(), "boxes": boxes, "multiply_adds": work, "parameters": work}

    rows = [row(0, "dense", 0.0, 0, 0.8, 100), row(1, "dense", 0.0, 0, 0.6, 100)]
    rows += [row(0, OURS, 0.2, 0, 0.4, 80), row(1, OURS, 0.2, 0, 0.6, 80), row(1, OURS, 0.2, 5, 0.6, 80)]
    lines = list(tables(rows))
    assert lines[0] == "\nYOLO11n, mAP50-95 of boxes; seeds: 2\n"
    assert lines[2] == "| dense | 1.000 | 1.000 | 0.700 ± 0.141 (100.0%) |  |  |  |"
    assert lines[3] == "| −20%, shrink | 0.800 | 0.800 | 0.500 ± 0.141 (75.0%) |  | 0.600 (100.0%) |  |"
    for each in rows[:2]:
        each["first"] = 0.8
    one = {**row(0, ONE, 0.2, 0, 0.0, 80), "first": 0.4}
    del one["boxes"]  # a detector of one class
    lines = list(tables([*rows, one]))
    assert not [
        line
        for line in lines[: lines.index("\nYOLO11n, mAP50-95 of boxes of the first class; seeds: 2\n")]
        if ONE in line
    ]
    assert f"| −20%, {ONE} | 0.800 | 0.800 | 0.400 (50.0%) |  |  |  |" in lines
