"""The `labkit` command. Heavy modules are imported by the commands that need them, so that `--help` comes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from labkit import workspace
from labkit.workspace import CampError

ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


class Commands(TyperGroup):
    """Turns what a command cannot go on with into one clear line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CampError as error:
            lines = str(error).splitlines()
        except OSError as error:
            lines = [f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")]
        for line in lines:
            typer.echo(f"labkit: {line}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Inference Camp: work on a lab, check it, hand it in. `labkit COMMAND --help` shows examples.",
)

Work = Annotated[
    Path | None, typer.Option(help="Folder of the working copies.  [default: work/ in the camp]", envvar="LABKIT_WORK")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main() -> None:
    """Entry point of the `labkit` command."""
    app()


def _work(given: Path | None, root: Path) -> Path:
    return (given or root / "work").absolute()


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do: driver, CUDA, torch, Triton, vLLM, and which labs run at which tier.

    \b
    Examples:
      labkit doctor
      labkit doctor --json
    """
    from labkit.doctor import run

    raise typer.Exit(run(as_json=as_json))


@app.command(context_settings=ANYTHING)
def start(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[LAB] [JUPYTERLAB OPTIONS]...", show_default=False)
    ] = None,
    work: Work = None,
) -> None:
    """Copy a lab to a working folder and open it in JupyterLab.

    Work that is there already is kept; a newer release is put beside it, as <lab>.new.ipynb. Without LAB: the one last
    worked on. Options that are not labkit's go to JupyterLab.

    \b
    Examples:
      labkit start
      labkit start lab1
      labkit start lab1 --no-browser --port 9000
    """
    from labkit import jupyter

    root = workspace.camp_root()
    folder = _work(work, root)
    words = [*(arguments or []), *ctx.args]
    named = bool(words) and not words[0].startswith("-")
    lab = workspace.find_lab(words[0], root) if named else workspace.last_worked_on(folder, root)
    for line in workspace.make_copy(lab, folder, root):
        typer.echo(line)
    if not jupyter.is_installed():
        raise CampError("JupyterLab is not installed here: `make lab` installs it; `labkit check` needs none")
    notebook = workspace.working_copy(lab, folder)
    raise typer.Exit(jupyter.serve(notebook, folder, root, words[named:], _say_url))


def _say_url(url: str) -> None:
    typer.echo(f"JupyterLab is at {url}")
    if "SSH_CONNECTION" in os.environ:
        port = url.split("/")[2].rpartition(":")[2]
        typer.echo(f"From your own machine: ssh -L {port}:127.0.0.1:{port} THIS_HOST, then open that address there.")


@app.command()
def check(
    lab: Annotated[str, typer.Argument(metavar="LAB|NOTEBOOK", help="A lab (your working copy) or a notebook file.")],
    question: Annotated[list[str] | None, typer.Option(help="Check this question only; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu for Triton's interpreter.")] = "auto",
    solution: Annotated[bool, typer.Option(help="Maintainers: check the lab's own solution.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each question.", min=1)] = 300,
    work: Work = None,
    as_json: Json = False,
) -> None:
    """Run a lab's visible checks on a notebook, without Jupyter: each question in a process of its own.

    LAB means your working copy; a path means that notebook. The exit code is 0 only if every question earned all its
    points.

    \b
    Examples:
      labkit check lab1
      labkit check lab1 --question block_allocator
      labkit check lab1 --device cuda --json
      labkit check some/folder/lab1_paged_attention.ipynb
    """
    from labkit import checktable

    _choose_device(device)
    notebook, release = _notebook_of(lab, solution, work)
    report = checktable.run(notebook, release, question, timeout, quiet=as_json)
    if as_json:
        typer.echo(checktable.as_json(report))
    else:
        checktable.show(report)
    raise typer.Exit(0 if report.all_well else 1)


def _notebook_of(lab: str, solution: bool, work: Path | None) -> tuple[Path, Path | None]:
    """(notebook to check, the lab's release if it is at hand)."""
    if lab.endswith(".ipynb") or os.sep in lab:
        if solution:
            raise CampError("--solution goes with a lab, not with a notebook file")
        notebook = Path(lab)
        if not notebook.is_file():
            raise CampError(f"no notebook {notebook}")
        return notebook, None
    root = workspace.camp_root()
    slug = workspace.find_lab(lab, root)
    release = workspace.release_notebook(slug, root)
    if not solution:
        return workspace.working_copy(slug, _work(work, root)), release
    solved = root / "solutions" / slug / f"{slug}.ipynb"
    if not solved.is_file():
        raise CampError(f"--solution is for maintainers: there is no {solved}")
    return solved, release


def _choose_device(device: str) -> None:
    """Make sure that kernels will run on `device`; for the interpreter on a GPU machine, this program starts anew."""
    if device not in ("auto", "cuda", "cpu"):
        raise CampError(f"--device {device!r}: auto, cuda or cpu")
    from labkit.device import tier

    if device == "cuda" and tier() != "cuda":
        raise CampError("--device cuda: torch finds no CUDA device here; `labkit doctor` says why")
    if device == "cpu" and tier() == "cuda":
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        raise typer.Exit(subprocess.run([sys.executable, "-m", "labkit.cli", *sys.argv[1:]], env=env).returncode)


@app.command()
def submit(
    lab: Annotated[str, typer.Argument(help="A lab; your working copy is handed in.")],
    student: Annotated[
        str | None, typer.Option(envvar="LABKIT_STUDENT", help="Your name in the course.  [default: this account's]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that the zip file is written to.")] = Path(),
    force: Annotated[bool, typer.Option(help="Write it in spite of what is missing.")] = False,
    work: Work = None,
) -> None:
    """Look your work over and write STUDENT-LAB.zip, which you hand in.

    \b
    Examples:
      labkit submit lab1 --student ada
      labkit submit lab1 --student ada --out ~/handed_in
    """
    root = workspace.camp_root()
    slug = workspace.find_lab(lab, root)
    name = workspace.student_name(student)
    written = workspace.submit(slug, _work(work, root), root, name, out, force)
    for line in written.notes:
        typer.echo(line)
    typer.echo(f"wrote {written.path}: hand in this file")


@app.command()
def inspect(
    kernel: Annotated[str, typer.Argument(help="A module of kernels/, or MODULE.FUNCTION.")],
    arch: Annotated[str, typer.Option(help="sm_80, sm_86, sm_89, sm_90 or sm_100.")] = "sm_90",
    show: Annotated[
        str | None,
        typer.Option(metavar="STAGE", help="Print ttir, ttgir, llir, ptx or sass instead, with source lines."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a kernel for a GPU, here or not: registers, spills, shared memory, occupancy, instructions, layouts.

    \b
    Examples:
      labkit inspect paged_attention
      labkit inspect flash_attention --arch sm_80 --json
      labkit inspect kv_cache.write_kv --show sass
    """
    from labkit.compiled import CompilationFailed, examples
    from labkit.compiled import show as shown

    try:
        shown.check_stage(show)
        made = shown.inspect_kernels(examples.examples_of(kernel), arch)
        texts = [shown.stage_text(one, show) if show else shown.as_text(example, one) for example, one in made]
    except (ValueError, CompilationFailed, TimeoutError) as error:
        raise CampError(str(error)) from error
    typer.echo(json.dumps([shown.as_data(*one) for one in made], indent=1) if as_json else "\n\n".join(texts))


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="smollm2, arithmetic, tiny-qwen3, a hub's OWNER/NAME ...")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Say whether it can be quantized in groups of this many inputs.")
    ] = None,
) -> None:
    """Get a model ready, offline unless it is on a hub, and print its folder; without a name, say which there are.

    \b
    Examples:
      labkit models
      labkit models smollm2
      labkit models Qwen/Qwen3-0.6B --group-size 128
    """
    from labkit.models import hub

    if name is None:
        typer.echo("\n".join(f"{known:12} {what}" for known, what in hub.OURS.items()))
        return
    try:
        folder = hub.model_path(name)
        if group_size is not None:
            hub.check_group_size(hub.read_config(folder), group_size)
    except (hub.ModelMissing, ValueError) as error:
        raise CampError(str(error)) from error
    typer.echo(folder)


@app.command()
def bench(
    kernels: Annotated[
        list[str] | None, typer.Argument(metavar="[KERNEL]...", help="All of them if none is named.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the samples there.")] = None,
) -> None:
    """Measure the shipped kernels beside their peers, in one run on this GPU.

    \b
    Examples:
      labkit bench paged_attention
      labkit bench paged_attention --json paged_attention.json
    """
    from labkit import benchmarks

    try:
        code = benchmarks.run(kernels or [], json_path)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CampError(str(error.args[0] if error.args else error)) from error
    raise typer.Exit(code or 0)


@app.command()
def release(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or not there yet.")],
) -> None:
    """Instructors: write the student's bundle, with no solution and no hidden check in it.

    \b
    Example:
      labkit release dist/inference-camp
    """
    _grading("release", str(target))


@app.command()
def build(
    labs: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", help="All of them if none is named.")] = None,
    only_check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a notebook is out of date.")
    ] = False,
) -> None:
    """Maintainers: write both notebooks of each lab from its source.

    \b
    Examples:
      labkit build
      labkit build --check
    """
    _grading("build", *(labs or []), *(["--check"] if only_check else []))


@app.command(context_settings=ANYTHING | {"help_option_names": []}, add_help_option=False)
def grade(ctx: typer.Context) -> None:
    """Instructors: grade a folder of submissions; `labkit grade --help` shows the options."""
    _grading("grade", *ctx.args)


def _grading(*arguments: str) -> None:
    """Run the instructor's half of the camp, which labkit itself never imports."""
    root = workspace.camp_root()
    if not (root / "grading").is_dir():
        raise CampError(f"`labkit {arguments[0]}` needs grading/, which a student's bundle does not hold")
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    # -P: a folder named grading here is not the camp's; what the arguments name is relative to here all the same.
    raise typer.Exit(subprocess.run([sys.executable, "-P", "-m", "grading", *arguments], env=env).returncode)


if __name__ == "__main__":
    main()
