"""The autograder's execution step, as a preprocessor of nbgrader's: a NotebookRun in a sandbox, and its report."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool, Float, Unicode

from grading.course import ROOT, Course
from grading.notebook_run import Clock, NotebookRun
from grading.repair import NOTES
from grading.sandbox import Box, Limits, camp_copy, unavailable
from grading.session import Session


class SafeExecute(NbGraderPreprocessor):
    """Runs the notebook with nothing of the course in reach. RuntimeError means trouble of the grader's own."""

    course_root = Unicode(str(ROOT), help="the course's tree").tag(config=True)
    camp = Unicode(help="a copy of labkit and kernels without the shipped answers; made when empty").tag(config=True)
    sandbox = Bool(True, help="isolate the kernel; False runs it as the grader's own user").tag(config=True)
    report = Unicode(help="file for the report, as JSON").tag(config=True)
    gpu = Unicode(help="CUDA_VISIBLE_DEVICES of the kernel").tag(config=True)
    memory_gb = Float(8.0, help="address space of the kernel; not applied on a machine with a GPU").tag(config=True)
    cell_seconds = Float(60.0, help="time of a cell without a limit of its own").tag(config=True)
    longest_cell_seconds = Float(600.0, help="no cell gets more, whatever its own limit").tag(config=True)
    notebook_seconds = Float(1200.0, help="wall clock of the whole notebook").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        lab = resources["nbgrader"]["notebook"]
        course = Course(Path(self.course_root)).activate()
        repairs = nb.metadata.pop(NOTES, [])
        release = {c.source for c in nbformat.read(course.release(lab), 4).cells if c.cell_type == "code"}
        with tempfile.TemporaryDirectory(prefix="camp-") as folder:
            camp = Path(self.camp) if self.camp else camp_copy(course, lab, Path(folder))
            clock = Clock(self.cell_seconds, self.longest_cell_seconds, self.notebook_seconds)

            def start(with_checks: bool) -> Session:
                return Session(lambda runtime: self._box(course, lab, camp, runtime, with_checks))

            run = NotebookRun(nb.cells, lab, start, clock, release)
            report = run.run()
        report.repairs, report.sandbox = list(repairs), "bwrap" if self.sandbox else "none"
        for incident in report.incidents:
            self.log.warning("%s in %s: %s", incident.kind, incident.where, incident.message)
        if self.report:
            Path(self.report).write_text(json.dumps(report.to_dict()), encoding="utf-8")
        return nb, resources

    def _box(self, course: Course, lab: str, camp: Path, runtime: Path, with_checks: bool) -> Box:
        if self.sandbox and unavailable():
            raise RuntimeError(f"no sandbox: {unavailable()}. SafeExecute.sandbox = False runs without one.")
        limits = Limits(memory_gb=self.memory_gb, cpu_s=int(4 * self.notebook_seconds))
        data, files = course.root / "labs" / lab, tuple(course.released_files(lab))
        hidden = () if with_checks else (f"labkit/checks/{lab}",)
        return Box(camp, data, files, runtime, self.sandbox, limits, self.gpu, hidden)
