"""What the benchmark found, for a person: tables on the console, a scaling plot."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MILLI = 1e3


def print_tables(found: dict[str, Any], console: Console) -> None:
    machine = found["machine"]
    console.print(
        f"{machine['processor']}, torch {machine['torch']}, mslmn {machine['mslmn']}, backend {machine['backend']}"
    )
    console.print("Median milliseconds; in parentheses how many times faster the MS-LMN is, in the same run.")
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["size"], row["threads"]), []).append(row)
    for (size, threads), rows in groups.items():
        dimensions = ", ".join(f"{symbol}={value}" for symbol, value in rows[0]["dimensions"].items())
        table = Table(title=f"{size} ({dimensions}), {threads} thread{'s' * (threads > 1)}", title_justify="left")
        for heading in ("", "parameters", "forward", "forward + backward"):
            table.add_column(heading, justify="left" if not heading else "right")
        for row in rows:
            times = [_time(row[key], rows[0][key], row is rows[0]) for key in ("forward", "training")]
            table.add_row(row["candidate"], f"{row['parameters']:,}", *times)
        console.print(table)
    if found["sweeps"]:
        console.print(_sweep_table(found["sweeps"]))
    table = Table(title="streaming one sequence step by step, 1 thread: microseconds a step", title_justify="left")
    for heading in ("", "MS-LMN", "nn.LSTM of as many parameters"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in found["streaming"]:
        ours, theirs = row["seconds"].values()
        table.add_row(row["size"], f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f} ({theirs / ours:.2f}x)")
    console.print(table)


def print_autoencoder(found: dict[str, Any], console: Console) -> None:
    machine = found["machine"]
    console.print(f"{machine['processor']}, torch {machine['torch']}, mslmn {machine['mslmn']}, one thread")
    console.print("Seconds, megabytes beside the data, relative error of sequences as decoded from their last states.")
    table = Table(
        title="LinearAutoencoder against slices (2014)", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("sequences", no_wrap=True)
    table.add_column("solver", no_wrap=True)
    for heading in ("s", "MB", "error", "slices", "error", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(
            row["case"],
            row["solver"],
            f"{row['seconds']:.3g}",
            "" if row["memory"] is None else f"{row['memory'] / 1e6:.0f}",
            f"{row['error']:.3f}",
            "" if row["slices_seconds"] is None else f"{row['slices_seconds']:.3g}",
            "" if row["slices_error"] is None else f"{row['slices_error']:.3f}",
            "" if row["ratio"] is None else f"{row['ratio']:.1f}x",
        )
    console.print(table)


def print_cuda(found: dict[str, Any], console: Console) -> None:
    console.width = max(console.width, 132)  # in a file, too, numbers are whole
    machine, limits = found["machine"], found["ceilings"]
    console.print(
        f"{machine.get('gpu', machine['processor'])}, torch {machine['torch']}, mslmn {machine['mslmn']}, "
        f"backend {machine['backend']}"
    )
    console.print("Median milliseconds; in parentheses how many times faster the MS-LMN is, in the same run.")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        dimensions = ", ".join(f"{symbol}={value}" for symbol, value in row["dimensions"].items())
        groups.setdefault(f"{row['size']} ({dimensions})", []).append(row)
    for title, rows in groups.items():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("", "parameters", "forward", "+ backward", "graph: forward", "+ backward"):
            table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
        for row in rows:
            times = [
                _time_or_dash(row[key], rows[0][key], row is rows[0])
                for key in ("forward", "training", "forward_graph", "training_graph")
            ]
            table.add_row(row["candidate"], f"{row['parameters']:,}", *times)
        console.print(table)
    console.print(_floor_table(groups))
    console.print(
        f"The floor is what {limits['bandwidth'] / 1e12:.2f} TB/s (a copy) and {limits['operations'] / 1e12:.1f} "
        "TFLOP/s (a product in fp32), measured in this run, allow: milliseconds, and how many times that was reached."
    )


def _time_or_dash(seconds: float | None, ours: float | None, is_ours: bool) -> str:
    if seconds is None or ours is None:
        return "-" if seconds is None else _time(seconds, seconds, True)
    return _time(seconds, ours, is_ours)


def _floor_table(groups: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title="how far from the floor", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "error", "us a step", "floor: forward", "reached", "+ backward", "reached"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    checked = (row for rows in groups.values() for row in rows if row["floors"] and row["error"] is not None)
    for row in checked:
        cells = [f"{row['error']:.1e}", f"{row['latency'] * 1e6:.3f}"]
        for what in ("forward", "training"):
            floor = row["floors"][what]
            cells += [f"{floor['seconds'] * MILLI:.4f}", f"{floor['ratio']:.1f}x"]
        table.add_row(f"{row['size']}, B={row['dimensions']['B']}: {row['candidate']}", *cells)
    return table


def _time(seconds: float, ours: float, is_ours: bool) -> str:
    digits = 1 if seconds > 0.1 else 2 if seconds > 1e-2 else 3
    return f"{seconds * MILLI:.{digits}f}" + ("        " if is_ours else f" ({seconds / ours:5.2f}x)")


def _sweep_table(sweeps: list[dict[str, Any]]) -> Table:
    table = Table(title="handwriting size, one dimension at a time, 1 thread", title_justify="left")
    for heading in ("", "forward", "forward + backward", "peer"):
        table.add_column(heading, justify="left" if heading in ("", "peer") else "right")
    for row in sweeps:
        symbol = row["swept"]
        cells = [
            f"{row[key]['MS-LMN'] * MILLI:.3f} ({row[key]['nn.LSTM'] / row[key]['MS-LMN']:5.2f}x)"
            for key in ("forward", "training")
        ]
        table.add_row(f"{symbol} = {row['dimensions'][symbol]}", *cells, row["peer"])
    return table


def plot_sweeps(sweeps: list[dict[str, Any]], path: Path) -> None:
    """Four panels: how time grows with T, B, M and g, beside the LSTM of as many parameters."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the plot needs matplotlib: pip install 'mslmn[experiments]'") from None
    symbols = list(dict.fromkeys(row["swept"] for row in sweeps))
    labels = {"T": "steps T", "B": "batch B", "M": "memory per module M", "g": "modules g"}
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flatten()
    for axis, symbol in zip(axes, symbols, strict=True):
        rows = [row for row in sweeps if row["swept"] == symbol]
        values = [row["dimensions"][symbol] for row in rows]
        for key, style in (("training", "-"), ("forward", "--")):
            for name, colour in (("MS-LMN", "#1b6ca8"), ("nn.LSTM", "#c8553d")):
                label = f"{name}, {'forward + backward' if key == 'training' else 'forward'}"
                times = [row[key][name] * MILLI for row in rows]
                axis.plot(values, times, style, color=colour, marker="o", markersize=3.5, label=label)
        axis.set(xlabel=labels[symbol], xscale="log", yscale="log")
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[::2]:
        axis.set_ylabel("milliseconds")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("One dimension at a time from T600 B32 I4 H144 M16 g9; nn.LSTM with as many parameters; one thread")
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format=path.suffix[1:], dpi=150)
    temporary.replace(path)
