"""A run over calibration text: one line for what is wrong, from one of several processes."""

import warnings

import pytest
import typer

from secateur.checkpoints import CheckpointError
from secateur.cli.terminal import Asked, read_data, resumable, warnings_as_lines


@pytest.mark.parametrize(("rank", "said"), [(None, "Warning: a\\x1b[2Jb\n"), ("0", "Warning: a\\x1b[2Jb\n"), ("1", "")])
def test_a_warning_is_a_line_from_the_first_process(monkeypatch, capsys, rank, said):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with warnings_as_lines():
        warnings.warn("a\x1b[2Jb", stacklevel=1)
    assert capsys.readouterr() == ("", said)


def test_who_is_interrupted_is_told_to_go_on(capsys):
    with pytest.raises(typer.Exit) as ended, resumable():
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "secateur: interrupted; run the same command again to go on.\n"


def test_a_directory_without_a_model_is_told_before_its_tokenizer_is_missed(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \.safetensors file here"):
        read_data(Asked("oneshot", "directory", {"directory": tmp_path, "data": "text.txt"}))
