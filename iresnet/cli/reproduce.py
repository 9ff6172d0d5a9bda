"""`iresnet reproduce`: a table or figure of the paper, ours beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..reproduce import RESULTS, Job, Reproduction, Stopped, Work, find
from ..results import cell
from .console import Device, Screen, choose_device, console, ctrl_c, progress, reporter, table, use_threads

#: What the digits of the budget smoke have.
SMALL = 64

#: What is said to whoever stops it.
GO_ON = "The same command goes on from there."

#: Numbers under these names are shown by their size.
SMALL_WORDS = ("error", "bias", "deviation", "bound")


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help=f"{', '.join(RESULTS)}; none lists them.")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="smoke: seconds, on 8x8 digits; short: fewer epochs, flows as their presets say; paper: 200."
        ),
    ] = "smoke",
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="mnist, cifar10, cifar100, for table4 digits, for figure2 moons, ...; several with commas.",
            show_default="the paper's",
        ),
    ] = None,
    cells: Annotated[
        list[str] | None, typer.Option(help="Models, e.g. c=0.9,vanilla,resnet164; flow,Glow,MAF.", show_default="all")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="ours, or that of the paper.", show_default="paper's for the budget paper")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting. May be repeated.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be repeated: mean and spread.", show_default="0")] = None,
    out: Annotated[Path, typer.Option(help="Folder for figures and pictures.")] = Path("runs/paper"),
    runs: Annotated[
        Path | None, typer.Option(help="Folder for trained models.", show_default="OUT/table2, flows OUT/table4")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where downloaded sets lie.")] = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
) -> None:
    """Make tables and figures of the paper, with the paper's values beside ours.

    Models that are missing are trained, and every result that shows them shares them. Ctrl-C saves; the same command
    goes on from there, and what is finished is not made again.

    Example: iresnet reproduce table2 figure8

    Example: iresnet reproduce table2 figure3 --budget short --dataset cifar10 --cells c=0.9,vanilla
    """
    screen = console()
    if not names:
        _list(screen)
        return
    results = find(names)
    job = Job(
        budget=budget,
        out=out,
        datasets=_words(dataset),
        models=_words(cells),
        seeds=tuple(seed or (0,)),
        recipe=recipe or "",
        overrides=tuple(set_ or ()),
        data_dir=data_dir,
        runs=runs,
        device=choose_device(device),
    )
    for result in results:
        result.check(job)  # what cannot be made is refused before anything is trained
    use_threads(SMALL if budget == "smoke" or job.datasets == ("digits",) else SMALL**2, threads)
    with ctrl_c(lambda: GO_ON) as stop, progress(screen) as bars:
        work = Work(
            job,
            report=lambda name: reporter(bars, name),
            stop=stop,
            say=screen.say,
        )
        try:
            outcomes = [result.run(work) for result in results]
        except Stopped as reason:
            bars.stop()
            screen.print(f"{reason}. {GO_ON}", soft_wrap=True)
            raise typer.Exit(130) from None
    for outcome in outcomes:
        show(screen, outcome)


def _words(values: list[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(w.strip() for v in values or () for w in v.split(",") if w.strip()))


def show(screen: Screen, outcome: Reproduction) -> None:
    """The table of one result, what is to be said about it, and where its files are."""
    screen.print(_table(outcome))
    screen.say(_made_with(outcome), *outcome.notes, *outcome.files)


def _table(outcome: Reproduction) -> Table:
    letters, columns = _letters(outcome), dict(outcome.columns)
    if len(letters) > 1:
        columns["as"] = "as"
    if len({r.get("seed") for r in outcome.results.rows if _made_as(r) in letters}) > 1:
        columns["seed"] = "seed"
    made = table(*columns, title=outcome.results.name)
    made.collapse_padding, made.pad_edge = True, False
    for column, key in zip(made.columns, columns.values(), strict=True):
        column.no_wrap, column.min_width = key != "paper", 5 if key == "paper" else None
    for row in outcome.results.rows:
        row = {**row, "as": letters.get(_made_as(row))}
        made.add_row(*(_cell(key, row.get(key)) + _spread(key, row) for key in columns.values()))
    return made


def _made_as(row: dict[str, Any]) -> str:
    return f"budget {row.get('budget')}, recipe {row.get('recipe')}, settings {row.get('settings') or 'as they are'}"


def _letters(outcome: Reproduction) -> dict[str, str]:
    """A letter for every way in which our rows were made."""
    ways = dict.fromkeys(_made_as(r) for r in outcome.results.rows if r.get("budget") != "published")
    return {way: _letter(i) for i, way in enumerate(ways)}


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else str(i + 1)


def _made_with(outcome: Reproduction) -> str:
    """The budget, recipe and settings of our rows; with letters, where there are several ways."""
    letters = _letters(outcome)
    return "made with " + "; ".join(f"{a}: {way}" if len(letters) > 1 else way for way, a in letters.items())


def _spread(key: str, row: dict[str, Any]) -> str:
    """What stands behind a mean over seeds."""
    main = "error %" if "error %" in row else "bits/dim"
    several = key == main and row.get("spread") is not None
    return f"\n± {_cell(main, row['spread'])}\n{row['seeds']} seeds" if several else ""


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float) and key in ("error %", "paper", "spread"):
        return f"{value:.2f}"
    if isinstance(value, float) and key == "change by tightening":
        return f"{value:+.2f}"
    if isinstance(value, float) and key in ("bits/dim", "error over images", "error of one image"):
        return f"{value:.4f}"
    if key == "parameters" and isinstance(value, int):
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,}"
    small = isinstance(value, float) and value != 0 and any(word in key for word in SMALL_WORDS)
    return f"{value:.1e}" if small else cell(value)


def _list(screen: Screen) -> None:
    for result in RESULTS.values():
        costs = [f"  {budget:<6} {cost}" for budget, cost in result.costs.items()]
        screen.say(f"{result.name}  {result.about}", f"  the paper: {result.says}", *costs)
    screen.say("Make one with: iresnet reproduce table2 --budget smoke")
