"""What a student sees: nbgrader without the instructor's tools, and a widget that redraws when it is dragged."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from labkit.cells import needed, read_cells

RUN_CELLS = """async (numbers) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    const code = notebook.widgets.filter(cell => cell.model.type === 'code');
    for (const number of numbers) {
        notebook.activeCellIndex = notebook.widgets.indexOf(code[number]);
        await window.jupyterapp.commands.execute('notebook:run-cell');
    }
    const errors = numbers.flatMap(n => code[n].model.sharedModel.getOutputs()).filter(o => o.output_type === 'error');
    return errors.map(o => `${o.ename}: ${o.evalue}`);
}"""


def status(student_lab, path: str, token: bool = True) -> int:
    """HTTP status of a page of the student's server."""
    headers = {"Authorization": f"token {student_lab.token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(student_lab.base + path, headers=headers)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def plugins(page) -> dict[str, bool]:
    """nbgrader's parts in the page, and whether each is there."""
    names = ("assignment-list", "menu", "course-list", "create-assignment", "formgrader", "validate-assignment")
    ask = "names => names.map(n => window.jupyterapp.hasPlugin('@jupyter/nbgrader:' + n))"
    return dict(zip(names, page.evaluate(ask, list(names)), strict=True))


def test_the_lab_starts_within_ten_seconds_once_files_are_warm(student_lab):
    assert student_lab.seconds < 30, "even a first start, on a busy machine, takes less"


def test_nobody_gets_in_without_the_token(student_lab):
    assert student_lab.base.startswith("http://127.0.0.1:")
    assert status(student_lab, "/api/contents", token=False) == 403
    assert status(student_lab, "/api/contents") == 200


def test_nbgrader_is_there_without_the_instructors_tools(page, student_lab):
    found = plugins(page)
    assert found["assignment-list"] and found["menu"], f"nbgrader's extensions did not load: {found}"
    wrong = [name for name in found if found[name] and name not in ("assignment-list", "menu")]
    assert not wrong, f"a student should not have: {wrong}"
    assert status(student_lab, "/nbgrader_version?version=0.9.6") == 200, "nbgrader's server extension did not load"
    assert status(student_lab, "/formgrader") == 404
    assert status(student_lab, "/formgrader/api/assignments") == 404
    assert status(student_lab, "/formgraders") == 404
    page.get_by_role("menuitem", name="Nbgrader").click()
    page.wait_for_selector(".lm-Menu-itemLabel:has-text('Assignment List')")
    entries = page.locator(".lm-Menu-itemLabel").all_inner_texts()
    assert not {"Formgrader", "Course List", "Create assignment"} & set(entries), entries
    assert page.get_by_text("Validate", exact=True).count() == 0, "Validate freezes the server: it should be hidden"
    assert page.get_by_text("Would you like to get notified about official Jupyter news?").count() == 0


def test_dragging_the_slider_of_lab_1_redraws_the_plot(page, student_lab):
    cells = read_cells(student_lab.notebook)
    widget = next(c for c in cells if "widgets.pool_stepper(" in c.source)
    numbers = [n for n, c in enumerate(cells) if c in needed(cells, [widget.id])]
    assert page.evaluate(RUN_CELLS, numbers) == [], "a cell that the widget needs failed"

    picture = page.locator("img.pool-picture")
    picture.wait_for()
    picture.scroll_into_view_if_needed()
    handle = page.locator(".jupyter-widgets .noUi-handle").first
    before, step, address = (
        picture.screenshot(),
        page.locator(".widget-readout").first.inner_text(),
        picture.get_attribute("src"),
    )
    shoot(page, "before")

    box = handle.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + box["height"] / 2, steps=10)
    page.mouse.up()
    page.wait_for_function("old => document.querySelector('img.pool-picture').src !== old", arg=address)
    page.wait_for_function("() => document.querySelector('img.pool-picture').complete")
    shoot(page, "after")

    assert page.locator(".widget-readout").first.inner_text() != step, "the slider did not move"
    assert picture.screenshot() != before, "the slider moved and the picture did not change"


def shoot(page, name: str) -> None:
    """Keep a screenshot in the folder that the variable CAMP_SCREENSHOTS names, if it does."""
    if folder := os.environ.get("CAMP_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")
