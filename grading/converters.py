"""Runs nbgrader's converters. Their exceptions say only "see above", so what they logged is kept for the reason."""

from __future__ import annotations

import logging
from typing import TextIO

from nbgrader.converters import BaseConverter
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config


class ConversionError(RuntimeError):
    """nbgrader could not convert a notebook; the message is its reason."""


def convert(
    kind: type[BaseConverter], config: Config, lab: str, student: str = "*", log_to: TextIO | None = None
) -> None:
    """Run one converter on one lab (and student); its log goes to `log_to`, if anywhere. Raises ConversionError."""
    directory = CourseDirectory(config=config, assignment_id=lab, notebook_id=lab, student_id=student)
    errors = _Errors()
    log = logging.Logger("grading.convert", logging.WARNING)
    log.handlers = [errors, logging.StreamHandler(log_to) if log_to else logging.NullHandler()]
    converter = kind(coursedir=directory, config=config, force=True, log=log)
    try:
        converter.start()
    except NbGraderException:
        raise ConversionError(errors.reason()) from None


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def reason(self) -> str:
        """The line that names the exception: the last one of a traceback, or the first message."""
        tracebacks = [line for line in self.lines if line.startswith("Traceback")]
        return tracebacks[0].strip().splitlines()[-1] if tracebacks else (self.lines or ["no reason given"])[0]
