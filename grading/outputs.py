"""What becomes of outputs: stderr is no failure, and the feedback shows nothing of a hidden check but its points."""

from __future__ import annotations

from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

from grading.blackbox import find_mark


class StderrIsNotFailure(NbGraderPreprocessor):
    """nbgrader gives 0 to a graded cell with anything on stderr, and torch, Triton and vLLM log there."""

    def preprocess_cell(self, cell: NotebookNode, resources: dict, index: int) -> tuple[NotebookNode, dict]:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                output.name = "stdout"
        return cell, resources


class HideHidden(NbGraderPreprocessor):
    """For the feedback: a hidden cell keeps its points, and loses its source and everything it said."""

    def preprocess_cell(self, cell: NotebookNode, resources: dict, index: int) -> tuple[NotebookNode, dict]:
        if cell.cell_type == "code" and (find_mark(cell.source) or "HIDDEN TESTS" in cell.source):
            cell.source, cell.outputs = "# Hidden checks ran here.", []
        return cell, resources
