"""What a student sees: nbgrader without the instructor's tools, and a widget that redraws when it is dragged."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from labkit.cells import needed, read_cells

KERNEL_STATUS = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
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


def test_the_lab_is_open_within_ten_seconds(student_lab):
    assert student_lab.cpu_seconds < 10, "CPU time, so that a busy machine does not count"


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

    picture, readout = page.locator("img.step-picture"), page.locator(".widget-readout").first
    picture.wait_for()
    picture.scroll_into_view_if_needed()
    first = settled(page, picture)
    shoot(page, "before")

    drag(page, 250)
    dragged = settled(page, picture)
    shoot(page, "after")
    assert readout.inner_text() != "0", "the slider did not move"
    assert dragged != first, "the slider moved and the picture did not change"

    drag(page, -600)
    assert settled(page, picture) == first and readout.inner_text() == "0", (
        "the first step looks different the second time"
    )


def drag(page, pixels: int) -> None:
    """Drag the handle of the slider sideways with the mouse."""
    box = page.locator(".jupyter-widgets .noUi-handle").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + pixels, box["y"] + box["height"] / 2, steps=10)
    page.mouse.up()
    page.mouse.move(5, 5)  # off the handle, which is drawn differently under the mouse


def settled(page, picture) -> bytes:
    """The picture as it is on the screen once the kernel has drawn all that it was asked for."""
    for _ in range(60):
        page.wait_for_function(f"() => {KERNEL_STATUS} === 'idle'")
        before = picture.screenshot()
        page.wait_for_timeout(700)
        if page.evaluate(KERNEL_STATUS) == "idle" and picture.screenshot() == before:
            return before
    raise AssertionError("the picture does not come to rest")


def shoot(page, name: str) -> None:
    """Keep a screenshot in the folder that the variable CAMP_SCREENSHOTS names, if it does."""
    if folder := os.environ.get("CAMP_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")
