"""The texts that ship: small, clean, free, and those of evaluation are not in those of calibration."""

from pathlib import Path

import pytest
import torch

from labkit import texts
from labkit.models import build_tiny, load_model

FOLDER = Path(texts.__file__).parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_model(str(build_tiny(tmp_path_factory.mktemp("texts") / "tiny")))[1]


def test_no_line_of_evaluation_is_in_calibration():
    seen = {line.strip() for name in texts.CALIBRATION for line in texts.read_text(name).splitlines()}
    for name in texts.EVALUATION:
        lines = [line.strip() for line in texts.read_text(name).splitlines()]
        assert not [line for line in lines if len(line) > 30 and line in seen], f"{name} is judged on what was seen"
    assert not set(texts.EVALUATION) & set(texts.CALIBRATION)


def test_each_text_is_clean_and_its_source_and_size_are_in_the_readme():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in texts.EVALUATION + texts.CALIBRATION:
        text = texts.read_text(name)
        assert f"| `{name}.txt` |" in readme and f"| {len(text):,} |" in readme
        assert text == text.strip() + "\n" and "\r" not in text and "\ufffd" not in text
    assert "Permission is hereby granted, free of charge" in readme, "the MIT licence asks for its text"
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(texts.EVALUATION + texts.CALIBRATION)
    assert sum(p.stat().st_size for p in FOLDER.glob("*.txt")) < 300_000


def test_windows_are_the_text_from_its_start_with_nothing_between_them(tokenizer):
    windows = texts.token_windows(tokenizer, "persuasion", count=3, length=50)
    assert windows.shape == (3, 50) and windows.dtype == torch.int64
    assert texts.read_text("persuasion").startswith(tokenizer.decode(windows.flatten()))


def test_calibration_takes_as_much_of_each_text_in_turn(tokenizer):
    windows = texts.calibration_windows(tokenizer, count=4, length=32)
    for start, name in enumerate(texts.CALIBRATION):
        assert torch.equal(windows[start::2], texts.token_windows(tokenizer, name, count=2, length=32))
    with pytest.raises(ValueError, match="count must be a multiple of 2, the number of texts, and is 3"):
        texts.calibration_windows(tokenizer, count=3)


def test_texts_refuse_what_they_do_not_have(tokenizer, capfd):
    with pytest.raises(ValueError, match=r"name must be one of persuasion, devils_dictionary.*, and is 'emma'"):
        texts.read_text("emma")
    with pytest.raises(ValueError, match=r"persuasion has \d+ tokens: too few for 1000 windows of 512"):
        texts.token_windows(tokenizer, "persuasion", count=1000)
    with pytest.raises(ValueError, match="count must be at least 1 and length at least 2"):
        texts.token_windows(tokenizer, "persuasion", length=1)
    assert capfd.readouterr().err == "", "a warning of the tokenizer costs a graded cell its points"
