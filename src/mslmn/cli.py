"""The command line: parses and calls, nothing else."""

import json
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

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


class Benchmark(StrEnum):
    """What `mslmn bench` can measure."""

    recurrence = "recurrence"
    autoencoder = "autoencoder"


@app.command()
def bench(
    what: Annotated[Benchmark, typer.Argument(help="The layers, or LinearAutoencoder.")] = Benchmark.recurrence,
    threads: Annotated[
        list[int], typer.Option(min=1, help="Layers: numbers of threads to measure with; repeat the option.")
    ] = [1, 2],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which the candidates take turns.")] = 21,
    sweep: Annotated[bool, typer.Option(help="Layers: also sweep T, B, M and g.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Autoencoder: also what takes minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the plot.")] = Path("bench"),
) -> None:
    """Time the layers against nn.LSTM, nn.RNN and the reference loop, or LinearAutoencoder against slices.

    Nothing is timed before it is checked. Examples:

    mslmn bench --threads 1 --no-sweep --repeats 51

    mslmn bench autoencoder --full
    """
    from .benchmarks import autoencoder, recurrence, report
    from .benchmarks.timing import Disagreement

    console = Console()
    try:  # before minutes of measuring, not after
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {out} ({error.strerror}); choose a folder you can write to") from None
    try:
        with console.status("") as status:

            def progress(doing: str) -> None:
                status.update(f"measuring: {escape(doing)}")

            if what is Benchmark.autoencoder:
                found = autoencoder.run(repeats, full, progress)
            else:
                found = recurrence.run(tuple(threads), repeats, sweep, progress)
    except Disagreement as error:
        console.print(f"[red]wrong:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    if what is Benchmark.autoencoder:
        report.print_autoencoder(found, console)
        _write_json(found, out / "autoencoder.json", console)
        return
    report.print_tables(found, console)
    _write_json(found, out / "bench.json", console)
    if found["sweeps"]:
        try:
            report.plot_sweeps(found["sweeps"], out / "scaling.png")
            console.print(f"wrote {out / 'scaling.png'}")
        except ImportError as error:
            console.print(f"no plot: {error}", markup=False)


def _write_json(found: dict[str, Any], path: Path, console: Console) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(found, indent=1))
    temporary.replace(path)
    console.print(f"wrote {path}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
