"""`iresnet reproduce`: reproduce a table or figure of the paper, with the paper's values beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..device import choose_device
from ..reproduce import RESULTS, Job, Reproduction, Stopped, Work, find
from ..results import cell, require_commit
from ..run.progress import progress, reporter
from .completion import complete_result
from .console import Screen, console, ctrl_c, result, results_console, table, use_threads
from .options import Device

#: The dimension of the digits that the budget smoke uses.
SMALL = 64

#: The message after a stop.
RESUME = "Run the same command again to resume."

#: Percentages: the names of these numbers end so.
PERCENT = ("error %", "low", "high")

#: Numbers whose name has one of these words are printed in scientific notation.
SCIENTIFIC = ("error", "bias", "deviation", "bound")


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"{', '.join(RESULTS)}. Without a name: list them.",
            autocompletion=complete_result,
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="smoke: seconds, on 8x8 digits; short: fewer epochs (flows: as in their presets); paper: 200 epochs."
        ),
    ] = "smoke",
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="mnist, cifar10, cifar100; also digits (table4) and moons, ... (figure2). Separate several by commas.",
            show_default="the paper's",
        ),
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(help="Models, for example c=0.9,vanilla,resnet164 or flow,Glow,MAF.", show_default="all"),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="ours or paper.", show_default="paper for the budget paper, else ours")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting. May be repeated.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed; several give a mean and a spread.", show_default="0")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics and plots.")] = Path("runs/paper"),
    runs: Annotated[
        Path | None, typer.Option(help="Folder for trained models.", show_default="OUT/table2, flows OUT/table4")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="The dataset directory.")] = None,
    device: Device = "auto",
) -> None:
    """Reproduce tables and figures of the paper, with the paper's values beside ours.

    Missing models are trained, and results share them. Ctrl-C saves; the same command resumes, and finished models are
    not trained again.

    Example: iresnet reproduce table2 figure8

    Example: iresnet reproduce table2 figure3 --budget short --dataset cifar10 --cells c=0.9,vanilla
    """
    screen = console()
    if not names:
        _list()
        return
    wanted = find(names)
    job = Job(
        budget=budget,
        out=out,
        datasets=_split_commas(dataset),
        models=_split_commas(cells),
        seeds=tuple(seed or (0,)),
        recipe=recipe or "",
        overrides=tuple(set_ or ()),
        data_dir=data_dir,
        runs=runs,
        device=choose_device(device),
    )
    require_commit(job.out)
    for one in wanted:
        one.check(job)  # refuse what cannot be reproduced before training
    use_threads(SMALL if budget == "smoke" or job.datasets == ("digits",) else SMALL**2)
    with ctrl_c(lambda: RESUME) as stop, progress(screen) as bars:
        work = Work(
            job,
            report=lambda name: reporter(bars, name),
            stop=stop,
            say=screen.say,
        )
        try:
            reproductions = [one.run(work) for one in wanted]
        except Stopped as reason:
            bars.stop()
            screen.say(f"{reason}. {RESUME}")
            raise typer.Exit(130) from None
    for reproduction in reproductions:
        show(results_console(), reproduction)
    result({"results": [_content(reproduction) for reproduction in reproductions]})


def _content(r: Reproduction) -> dict[str, Any]:
    return {"name": r.results.name, "rows": r.results.rows, "notes": r.notes, "files": r.files}


def _split_commas(values: list[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(w.strip() for v in values or () for w in v.split(",") if w.strip()))


def show(screen: Screen, reproduction: Reproduction) -> None:
    """Print the table of one result, its notes and its files."""
    screen.print(_table(reproduction))
    screen.say(_trained_with(reproduction), *reproduction.notes, *reproduction.files)


def _table(reproduction: Reproduction) -> Table:
    letters, columns = _letters(reproduction), dict(reproduction.columns)
    if len(letters) > 1:
        columns["as"] = "as"
    if len({r.get("seed") for r in reproduction.results.rows if _trained_as(r) in letters}) > 1:
        columns["seed"] = "seed"
    made = table(*columns, title=reproduction.results.name)
    made.collapse_padding, made.pad_edge = True, False
    for column, key in zip(made.columns, columns.values(), strict=True):
        column.no_wrap, column.min_width = key != "paper", 5 if key == "paper" else None
    for row in reproduction.results.rows:
        row = {**row, "as": letters.get(_trained_as(row))}
        made.add_row(*(_cell(key, row.get(key)) + _spread(key, row) for key in columns.values()))
    return made


def _trained_as(row: dict[str, Any]) -> str:
    return f"budget {row.get('budget')}, recipe {row.get('recipe')}, settings {row.get('settings') or 'unchanged'}"


def _letters(reproduction: Reproduction) -> dict[str, str]:
    """Return a letter for each combination of budget, recipe and settings among our rows."""
    combinations = dict.fromkeys(_trained_as(r) for r in reproduction.results.rows if r.get("budget") != "published")
    return {way: _letter(i) for i, way in enumerate(combinations)}


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else str(i + 1)


def _trained_with(reproduction: Reproduction) -> str:
    """Return the budget, recipe and settings of our rows, with letters if there are several."""
    letters = _letters(reproduction)
    return "trained with " + "; ".join(f"{a}: {way}" if len(letters) > 1 else way for way, a in letters.items())


def _spread(key: str, row: dict[str, Any]) -> str:
    """Return the spread to print behind a mean over seeds."""
    main = "error %" if "error %" in row else "bits/dim"
    several = key == main and row.get("spread") is not None
    return f"\n± {_cell(main, row['spread'])}\n{row['seeds']} seeds" if several else ""


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float) and (key.rsplit(", ", 1)[-1] in PERCENT or key in ("paper", "spread")):
        return f"{value:.2f}"
    if isinstance(value, float) and key == "change by tightening":
        return f"{value:+.2f}"
    if isinstance(value, float) and key in ("bits/dim", "error over images", "error of one image"):
        return f"{value:.4f}"
    if key == "parameters" and isinstance(value, int):
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,}"
    small = isinstance(value, float) and value != 0 and any(word in key for word in SCIENTIFIC)
    return f"{value:.1e}" if small else cell(value)


def _list() -> None:
    for known in RESULTS.values():
        costs = [f"  {budget:<6} {cost}" for budget, cost in known.costs.items()]
        results_console().say(f"{known.name}  {known.about}", f"  in the paper: {known.says}", *costs)
    result(
        {"results": [{"name": r.name, "about": r.about, "paper": r.says, "costs": r.costs} for r in RESULTS.values()]},
        "Reproduce one with: iresnet reproduce table2 --budget smoke",
    )
