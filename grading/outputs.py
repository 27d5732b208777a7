"""What becomes of outputs: stderr is no failure, no page runs a script, a hidden check shows nothing but its points."""

from __future__ import annotations

import re

import bleach
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

from grading.blackbox import find_mark

BASE64 = re.compile(r"[A-Za-z0-9+/=\s]*")
TAGS = {
    *bleach.ALLOWED_TAGS, "p", "br", "hr", "pre", "div", "span", "h1", "h2", "h3", "h4", "h5", "h6", "sub", "sup",
    "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td",
    "details", "summary", "img",
}  # fmt: skip
ATTRIBUTES = {**bleach.ALLOWED_ATTRIBUTES, "*": ["class", "id"], "img": ["src", "alt"], "details": ["open"]}


class StderrIsNotFailure(NbGraderPreprocessor):
    """nbgrader gives 0 to a graded cell with anything on stderr, and torch, Triton and vLLM log there."""

    def preprocess_cell(self, cell: NotebookNode, resources: dict, index: int) -> tuple[NotebookNode, dict]:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                output.name = "stdout"
        return cell, resources


class HarmlessOutputs(NbGraderPreprocessor):
    """Leaves of a display its text, its images, and HTML that can do nothing: an instructor's browser shows it.

    nbconvert writes most other types into a page as they stand (SVG, LaTeX, JavaScript, even what claims to be base64).
    """

    def preprocess_cell(self, cell: NotebookNode, resources: dict, index: int) -> tuple[NotebookNode, dict]:
        for output in cell.get("outputs", []):
            if output.output_type in ("display_data", "execute_result"):
                output.data, output.metadata = _harmless(output.data), NotebookNode()
        return cell, resources


def _harmless(data: dict) -> NotebookNode:
    kept = NotebookNode()
    for kind, value in data.items():
        image = kind in ("image/png", "image/jpeg") and isinstance(value, str) and BASE64.fullmatch(value)
        if image or kind == "text/plain":
            kept[kind] = value
        elif kind == "text/html" and isinstance(value, str):
            kept[kind] = _clean(value)
    if data and not kept:
        kept["text/plain"] = "(an output that is not shown here)"
    return kept


def markdown(source: str) -> str:
    """Markdown as a page shows it: nbconvert's own filter, without the scripts that it passes on."""
    return _clean(MarkdownWithMath(renderer=IPythonRenderer(escape=False)).render(source))


def _clean(html: str) -> str:
    return str(bleach.clean(html, tags=TAGS, attributes=ATTRIBUTES))


class HideHidden(NbGraderPreprocessor):
    """For the feedback: a hidden cell keeps its points, and loses its source and everything it said."""

    def preprocess_cell(self, cell: NotebookNode, resources: dict, index: int) -> tuple[NotebookNode, dict]:
        if cell.cell_type == "code" and (find_mark(cell.source) or "HIDDEN TESTS" in cell.source):
            cell.source, cell.outputs = "# Hidden checks ran here.", []
        return cell, resources
