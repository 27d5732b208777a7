"""nbgrader's configuration of the camp, as a function for our own programs and as a config file for nbgrader's.

`JUPYTER_CONFIG_PATH=$PWD/grading` makes nbgrader's command line and JupyterLab's formgrader find it.
"""

from __future__ import annotations

from pathlib import Path

from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]


def course_config() -> Config:
    """Folders, ignore list and stub text. The ignore list keeps the sources, with their solutions, out of the release."""
    c = Config()
    c.CourseDirectory.root = str(ROOT)
    c.CourseDirectory.course_id = "inference-camp"
    c.CourseDirectory.source_directory = "solutions"
    c.CourseDirectory.release_directory = "labs"
    for step in ("submitted", "autograded", "feedback", "solution", "source_with_tests"):
        setattr(c.CourseDirectory, f"{step}_directory", f"grading/{step}")
    c.CourseDirectory.db_url = f"sqlite:///{ROOT}/grading/gradebook.db"
    c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "*.nb.py"]
    c.Exchange.root = str(ROOT / "grading" / "exchange")
    c.ClearSolutions.code_stub = {"python": "raise NotImplementedError"}
    return c


if "get_config" in globals():  # read by traitlets as a config file
    get_config().merge(course_config())  # type: ignore[name-defined]  # noqa: F821
