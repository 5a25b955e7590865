"""The command line: parses and calls, nothing else."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .ops import backends

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="MultiScale Linear Memory Networks for PyTorch.",
)


@app.callback()
def _main() -> None:
    """Commands of the package; each has its own --help."""


@app.command()
def doctor() -> None:
    """Tell what is installed, and who computes the recurrence on each device, and why."""
    console = Console()
    table = Table(title="versions", title_justify="left", show_header=False)
    for name in ("mslmn", "torch", "numpy", "scipy", "scikit-learn", "safetensors"):
        table.add_row(name, _version(name))
    for extra, names in {"experiments": ("lightning", "matplotlib", "librosa"), "search": ("optuna",)}.items():
        for name in names:
            table.add_row(name, _version(name) or escape(f"not installed: pip install 'mslmn[{extra}]'"))
    console.print(table)
    table = Table("device", "backend", "because", title="who computes", title_justify="left")
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for name in devices:
        device = torch.device(name)
        label = name if device.type == "cpu" else f"{name} {torch.cuda.get_device_name(device)}"
        try:
            table.add_row(label, backends.chosen(device), backends.explain(device.type))
        except RuntimeError as error:
            table.add_row(label, "none", str(error))
    console.print(table)
    console.print(
        f"{torch.get_num_threads()} threads (torch.set_num_threads). A wish: mslmn.set_backend(...) or MSLMN_BACKEND."
    )


@app.command()
def bench(
    threads: Annotated[
        list[int], typer.Option(min=1, help="Numbers of threads to measure with; repeat the option.")
    ] = [1, 2],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which the candidates take turns.")] = 21,
    sweep: Annotated[bool, typer.Option(help="Also sweep T, B, M and g.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and scaling.png.")] = Path("bench"),
) -> None:
    """Time the MS-LMN against nn.LSTM, nn.RNN and the reference loop, after checking that it is right.

    Example: mslmn bench --threads 1 --no-sweep --repeats 51
    """
    from .benchmarks import recurrence, report

    console = Console()
    try:  # before minutes of measuring, not after
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {out} ({error.strerror}); choose a folder you can write to") from None
    try:
        with console.status("") as status:
            found = recurrence.run(tuple(threads), repeats, sweep, lambda what: status.update(f"measuring: {what}"))
    except recurrence.Disagreement as error:
        console.print(f"[red]wrong:[/red] {error}")
        raise typer.Exit(1) from None
    report.print_tables(found, console)
    temporary = out / "bench.json.tmp"
    temporary.write_text(json.dumps(found, indent=1))
    temporary.replace(out / "bench.json")
    console.print(f"wrote {out / 'bench.json'}")
    if found["sweeps"]:
        try:
            report.plot_sweeps(found["sweeps"], out / "scaling.png")
            console.print(f"wrote {out / 'scaling.png'}")
        except ImportError as error:
            console.print(f"no plot: {error}", markup=False)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
