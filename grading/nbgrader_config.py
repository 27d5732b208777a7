"""nbgrader's configuration of the camp, as a function for our own programs and as a config file for nbgrader's.

`JUPYTER_CONFIG_PATH=$PWD/grading` makes nbgrader's command line and JupyterLab's formgrader find it.
"""

from __future__ import annotations

from pathlib import Path

from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]

# Repair first, so that nbgrader's own steps never meet the metadata that stops them.
SANITIZE = [
    "nbgrader.preprocessors.ClearOutput",
    "grading.repair.RepairCells",
    "nbgrader.preprocessors.DeduplicateIds",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "nbgrader.preprocessors.CheckCellMetadata",
]
AUTOGRADE = [
    "grading.execute.SafeExecute",
    "grading.outputs.StderrIsNotFailure",
    "grading.outputs.HarmlessOutputs",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
FEEDBACK = [
    "nbgrader.preprocessors.GetGrades",
    "grading.outputs.HideHidden",
    "grading.outputs.HarmlessOutputs",
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]


def course_config(root: Path = ROOT, work: Path | None = None) -> Config:
    """Configuration of the course in `root`; run-time folders and gradebook lie under `work`, or under root/grading."""
    c = Config()
    c.CourseDirectory.root = str(work or root)
    c.CourseDirectory.course_id = "inference-camp"
    c.CourseDirectory.source_directory = str(root / "solutions") if work else "solutions"
    c.CourseDirectory.release_directory = str(root / "labs") if work else "labs"
    for step in ("submitted", "autograded", "feedback", "solution", "source_with_tests"):
        setattr(c.CourseDirectory, f"{step}_directory", step if work else f"grading/{step}")
    c.CourseDirectory.db_url = f"sqlite:///{work or root / 'grading'}/gradebook.db"
    # Keeps the sources, with their solutions, out of the release.
    c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "*.nb.py"]
    c.Exchange.root = str((work or root / "grading") / "exchange")
    c.ClearSolutions.code_stub = {"python": "raise NotImplementedError"}
    c.Autograde.sanitize_preprocessors = list(SANITIZE)
    c.Autograde.autograde_preprocessors = list(AUTOGRADE)
    c.GenerateFeedback.preprocessors = list(FEEDBACK)
    c.HTMLExporter.filters = {"markdown2html": "grading.outputs.markdown"}  # feedback pages and formgrader
    c.RepairCells.labs_directory = str(root / "labs")
    c.SafeExecute.course_root = str(root)
    c.OverwriteCells.add_missing_cells = True
    c.AssignLatePenalties.plugin_class = "grading.late.PerDay"
    c.PerDay.per_day, c.PerDay.at_most, c.PerDay.grace_minutes = 0.1, 0.5, 15
    return c


if "get_config" in globals():  # read by traitlets as a config file
    get_config().merge(course_config())  # type: ignore[name-defined]  # noqa: F821
