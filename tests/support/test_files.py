"""Files are there whole or not at all."""

import errno
import os
import stat

import pytest

from secateur.support import naming, whole_file, write_whole


def test_a_failure_leaves_what_was_there_before(tmp_path):
    path = write_whole(tmp_path / "note.txt", "before")
    for failure in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(failure)), whole_file(path) as file:
            file.write(b"half")
            raise failure
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["note.txt"]


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with pytest.raises(OSError, match="full") as caught, whole_file(tmp_path / "note.txt"):
            raise OSError(number, "full")
        assert caught.value.filename == str(tmp_path / "note.txt")
    with pytest.raises(OSError, match="gone") as caught, naming("out"):
        raise OSError(errno.EIO, "gone")
    assert caught.value.filename is None


def test_a_link_stays_a_link_and_the_mode_is_that_of_a_new_file(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "note.txt")
    mask = os.umask(0o027)
    try:
        write_whole(tmp_path / "link", "kept")
    finally:
        os.umask(mask)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "note.txt").read_text() == "kept"
    assert stat.S_IMODE((tmp_path / "there" / "note.txt").stat().st_mode) == 0o640


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"note\.txt cannot be written: there is no folder .*none; create it"):
        write_whole(tmp_path / "none" / "note.txt", "x")
