"""Instructor's floor: build, sandboxed grading, hidden checks. Nothing but the tests imports it."""
