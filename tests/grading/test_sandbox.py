"""The box around a student's kernel, and what happens where it cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import toy
from toy import LAB

from grading import grade, gradebook, sandbox
from grading.grade import Options, grade_folder
from grading.sandbox import Box, Limits, camp_copy
from labkit.cells import read_cells
from labkit.checks import find_question


def test_the_copy_for_the_kernel_holds_no_shipped_answer(course, tmp_path):
    camp = camp_copy(course, LAB, tmp_path / "camp")
    assert (camp / "labkit" / "checks" / LAB / "__init__.py").exists() and (camp / "kernels" / "__init__.py").exists()
    assert not [p for p in camp.rglob("*") if "toy_answer" in p.name], "the shipped answer, or its bytecode, was copied"
    assert not (camp / "grading").exists() and not (camp / "solutions").exists()


def test_a_mask_that_hides_nothing_is_an_error(course, tmp_path, monkeypatch):
    monkeypatch.setattr(find_question("softmax"), "shipped", ("kernels.renamed_since",))
    with pytest.raises(ValueError, match=r"'kernels\.renamed_since' as shipped, and there is no such module"):
        camp_copy(course, LAB, tmp_path / "camp")


def box(tmp_path: Path, **options) -> Box:
    return Box(tmp_path, tmp_path, (), tmp_path, **({"isolated": True} | options))


def test_the_box_has_no_network_no_capabilities_and_limits(tmp_path):
    command = " ".join(box(tmp_path, limits=Limits(memory_gb=2, cpu_s=30)).command())
    for part in ("--unshare-all", "--cap-drop ALL", "--clearenv", "--die-with-parent", "--cpu=30", f"--as={2 << 30}"):
        assert part in command, command
    assert command.index("bwrap") < command.index("--nproc=512"), "outside, all of the grader's tasks would count"


def test_with_a_gpu_its_devices_are_bound_and_address_space_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "cuda_devices", lambda: ["/dev/nvidia0", "/dev/nvidiactl"])
    command = " ".join(box(tmp_path, gpu="1").command())
    assert "--dev-bind /dev/nvidia0 /dev/nvidia0 --dev-bind /dev/nvidiactl" in command
    assert "--as=" not in command, "CUDA reserves far more address space than it uses"
    assert "--setenv CUDA_VISIBLE_DEVICES 1" in command


def test_the_kernel_inherits_nothing_of_the_graders_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMP_TEST_SECRET", "x")
    assert "CAMP_TEST_SECRET" not in box(tmp_path, isolated=False).environment()


def test_a_required_sandbox_that_is_absent_stops_the_run(course, monkeypatch):
    monkeypatch.setattr(grade, "unavailable", lambda: "bwrap is not installed")
    (course.root / "in").mkdir()
    with pytest.raises(ValueError, match="the sandbox is required, and bwrap is not installed"):
        grade_folder(course.root / "in", [LAB], course, Options(sandbox="require", quiet=True))


def test_without_a_sandbox_grading_goes_on_with_a_loud_warning_and_says_so_in_the_report(course, monkeypatch, capsys):
    """And the wall clock of a whole notebook: three endless cells, and what was earned before them stays."""
    monkeypatch.setattr(grade, "unavailable", lambda: "bwrap is not installed")
    notebook = toy.solved(course)
    for _ in range(3):
        toy.insert(notebook, "while True: pass", after="total_hidden")
    toy.hand_in(course.root / "in", "ann", notebook)
    times = {"cell_seconds": 4.0, "notebook_seconds": 14.0}
    (line,) = grade_folder(course.root / "in", [LAB], course, Options(1, csv=course.root / "g.csv", settings=times))
    said = capsys.readouterr().out
    assert "NO SANDBOX: bwrap is not installed" in said and line.sandbox == "none"
    assert "out_of_time" in line.notes, line.notes
    with gradebook.opened(course) as book:
        scores = {g.name: g.auto_score for g in book.find_submission_notebook(LAB, LAB, "ann").grades}
    assert scores["ceil_div_check"] == 2.0 and scores["total_check"] == 1.0, "points earned in time were lost"
    assert scores["softmax_check"] == 0.0
    hidden = [scores[f"{question}_hidden"] for question in ("ceil_div", "total", "softmax")]
    assert hidden == [3.0, 1.0, 2.0], "the hidden checks have time of their own, and run no endless cell"


@pytest.mark.parametrize(
    "lab",
    [
        "lab1_paged_attention",
        "lab2_flash_attention",
        "lab3_int4_quantization",
        "lab4_cuda_graphs",
        "lab5_vllm_serving",
    ],
)
def test_a_labs_checks_import_without_the_answers_that_it_ships(lab, tmp_path):
    """A mask must not take away what the visible checks need, nor what the setup cell of the notebook imports."""
    camp = camp_copy(grade.Course(), lab, tmp_path / "camp")
    code = f"import sys; sys.path = [p for p in sys.path if p]; import labkit.checks.{lab} as m; print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(camp)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert Path(done.stdout.strip()).is_relative_to(camp)
    cells = read_cells(grade.Course().release(lab))
    setup = next(c.source for c in cells if c.id == "setup")
    code = f"import sys; sys.path = [p for p in sys.path if p]\n{setup}\nassert labkit.checks.questions_of({lab!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(camp), "HOME": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
