"""The command line: parses and calls, nothing else."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
    for extra, names in {
        "experiments": ("matplotlib", "librosa", "soundfile", "Hershey-Fonts", "defusedxml"),
        "search": ("optuna",),
    }.items():
        for name in names:
            table.add_row(name, _version(name) or escape(f"not installed: pip install 'mslmn[{extra}]'"))
    console.print(table)
    table = Table("device", "backend", "because", title="who computes", title_justify="left")
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for name in devices:
        device = torch.device(name)
        label = name if device.type == "cpu" else f"{name} {torch.cuda.get_device_name(device)}"
        try:
            table.add_row(label, backends.chosen(device), backends.explain(device))
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
        list[int], typer.Option(min=1, help="On the CPU: numbers of threads to measure with; repeat the option.")
    ] = [1, 2],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which the candidates take turns.")] = 21,
    sweep: Annotated[bool, typer.Option(help="On the CPU: also sweep T, B, M and g.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Autoencoder: also what takes minutes.")] = False,
    device: Annotated[str, typer.Option(help="Layers: cpu, or a GPU: cuda, cuda:1.")] = "cpu",
    require: Annotated[
        bool, typer.Option("--require", help="On a GPU: fail where a required ratio is missed.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the plot.")] = Path("bench"),
) -> None:
    """Time the layers against nn.LSTM, nn.RNN and the reference loop, or LinearAutoencoder against slices.

    Nothing is timed before it is checked. Examples:

    mslmn bench --threads 1 --no-sweep --repeats 51

    mslmn bench --device cuda --require

    mslmn bench autoencoder --full
    """
    from .benchmarks import autoencoder, cuda, recurrence, report
    from .benchmarks.timing import Disagreement

    console = Console()
    with _told(console):
        on_gpu = _on_gpu(device, what, require)
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
            elif on_gpu:
                found = cuda.run(repeats, progress, device)
            else:
                found = recurrence.run(tuple(threads), repeats, sweep, progress)
    except Disagreement as error:
        console.print(f"[red]wrong:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    if what is Benchmark.autoencoder:
        report.print_autoencoder(found, console)
        _write_json(found, out / "autoencoder.json", console)
        return
    if on_gpu:
        report.print_cuda(found, console)
        _write_json(found, out / "cuda.json", console)
        missed = cuda.missed(found) if require else []
        for line in missed:
            console.print(f"[red]missed:[/red] {escape(line)}", soft_wrap=True)
        if missed:
            raise typer.Exit(1)
        return
    report.print_tables(found, console)
    _write_json(found, out / "bench.json", console)
    if found["sweeps"]:
        try:
            report.plot_sweeps(found["sweeps"], out / "scaling.png")
            console.print(f"wrote {out / 'scaling.png'}")
        except ImportError as error:
            console.print(f"no plot: {error}", markup=False)


class Experiment(StrEnum):
    """What `mslmn reproduce` can run."""

    generation = "generation"
    words = "words"
    handwriting = "handwriting"
    all = "all"


class Preset(StrEnum):
    """How."""

    quick = "quick"
    paper = "paper"
    best = "best"


class FeatureKind(StrEnum):
    """What a step of handwriting is."""

    absolute = "absolute"
    offsets = "offsets"


class AlphabetKind(StrEnum):
    """Which characters have labels."""

    paper = "paper"
    all = "all"


IamOndb = Annotated[
    Path | None,
    typer.Option(help="Handwriting: IAM-OnDB, with the lists of its task t1 in it, in place of synthetic lines."),
]
Pendigits = Annotated[Path | None, typer.Option(help="Handwriting: pendigits, joined to strings of digits.")]
Lines = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Handwriting: lines that train, where they are synthetic or of pendigits; prepare takes 1,000, "
        "reproduce 1,500 (quick) or 5,000, by default.",
    ),
]
Features = Annotated[
    FeatureKind | None,
    typer.Option(
        help="Handwriting: coordinates, as in the paper, or how the pen moved; by default absolute, but offsets in "
        "reproduce with the presets quick and best."
    ),
]
AlphabetChoice = Annotated[
    AlphabetKind | None,
    typer.Option(help="Handwriting: the paper's characters, or all of the training texts (pendigits: always)."),
]


Out = Annotated[Path, typer.Option(help="Folder for runs and report.")]
Timit = Annotated[Path | None, typer.Option(help="Words: a TIMIT tree, in place of the embedded clips.")]
WordList = Annotated[Path | None, typer.Option("--words", help="Words: a file with other words, with --timit.")]
Prepared = Annotated[Path | None, typer.Option(help="What `mslmn prepare` wrote.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; a GPU if there is one, by default.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; as many as there are cores, by default.")]


@app.command()
def reproduce(
    experiment: Annotated[Experiment, typer.Argument(help="Which experiment of the paper.")],
    preset: Annotated[
        Preset, typer.Option(help="quick: ours, in minutes; paper: its hyper-parameters; best: ours.")
    ] = Preset.quick,
    out: Out = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    models: Annotated[str | None, typer.Option(help="Only these, separated by commas: MS-LMN,LSTM.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first run of each model; data do not depend on it.")] = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each model, with different seeds.")] = None,
    budgets: Annotated[str | None, typer.Option(help="Generation: parameters, of 100,250,500,1000.")] = None,
    splits: Annotated[int | None, typer.Option(min=1, max=10, help="Words: how many of the ten splits.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Generation: a recording, in place of the embedded one.")] = None,
    offset: Annotated[
        float | None, typer.Option(help="Generation: seconds from the start of the recording, 0.5 by default.")
    ] = None,
    timit: Timit = None,
    words: WordList = None,
    iam_ondb: IamOndb = None,
    pendigits: Pendigits = None,
    lines: Lines = None,
    features: Features = None,
    alphabet: AlphabetChoice = None,
    prepared: Prepared = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="In place of the preset's.")] = None,
    jobs: Jobs = None,
    device: Device = None,
) -> None:
    """Run the paper's experiments, print its tables beside ours, write one HTML page.

    Ctrl-C keeps what was done; --resume goes on. Examples:

    mslmn reproduce all

    mslmn reproduce generation --preset best --audio song.flac --offset 12.5 --out song

    mslmn reproduce words --preset paper --timit /data/TIMIT --models MS-LMN,LSTM --seeds 10 --resume

    mslmn reproduce handwriting --preset best --iam-ondb /data/IAM-OnDB --features offsets --out iam
    """
    from . import report
    from .experiments import generation, handwriting
    from .experiments import jobs as running
    from .experiments import words as spoken_words

    console = Console()
    with _told(console):
        _check_folder(out, resume)
        _check_device(device)
        every = experiment is Experiment.all
        pen_options = {"iam-ondb": iam_ondb, "pendigits": pendigits, "lines": lines, "features": features}
        of_others: dict[str, dict[str, object]] = {
            "generation": {"audio": audio, "offset": offset, "budgets": budgets},
            "words": {"timit": timit, "words": words, "splits": splits},
            "handwriting": {**pen_options, "alphabet": alphabet},
        }
        for name, options in of_others.items():
            if not every and experiment.value != name:
                _check_unused(experiment.value, **options)
        generators, classifiers, readers = (
            _models(models, known, every) if every or experiment.value == name else ()
            for name, known in (
                (generation.NAME, generation.MODELS),
                (spoken_words.NAME, spoken_words.MODELS),
                (handwriting.NAME, handwriting.MODELS),
            )
        )
        # before anything is written
        clips = _words(timit, words, prepared) if classifiers else None
        own = None if every else prepared  # with all experiments, what was prepared are words
        source = iam_ondb or pendigits or own
        written = (
            _handwriting(
                *(iam_ondb, pendigits, own),
                lines=lines or (None if source else handwriting.LINES[preset.value]),
                features=features or (None if own else FeatureKind(handwriting.FEATURES[preset.value])),
                alphabet=alphabet,
                words=handwriting.WORDS[preset.value],
            )
            if readers
            else None
        )
        if written is not None and written.kind != handwriting.FEATURES[preset.value]:
            console.print(
                f"note: the pen's features are {written.kind}; preset {preset.value} was made for "
                f"{handwriting.FEATURES[preset.value]} (--features)",
                soft_wrap=True,
            )
        tasks = []
        if generators:
            tasks += generation.tasks(
                out,
                preset.value,
                models=generators,
                budgets=_budgets(budgets),
                seed=seed,
                seeds=seeds,
                epochs=epochs,
                recording=audio,
                **({} if offset is None else {"offset": offset}),
            )
        if clips is not None:
            tasks += spoken_words.tasks(
                out,
                preset.value,
                clips,
                models=classifiers,
                splits=splits or 1,
                seed=seed,
                seeds=seeds,
                epochs=epochs,
            )
        if written is not None:
            tasks += handwriting.tasks(
                out, preset.value, written, models=readers, seed=seed, seeds=seeds, epochs=epochs
            )
        follow = experiment is Experiment.handwriting and preset is not Preset.quick  # hours, without a GPU
        try:
            failed = running.execute(tasks, processes=jobs, device=device, console=console, follow=follow)
        except KeyboardInterrupt:
            done = sum(task.done for task in tasks)
            message = f"stopped: {done} of {len(tasks)} runs are done; go on with --resume --out {out}"
            console.print(message, markup=False, soft_wrap=True)
            raise typer.Exit(130) from None
        if any(task.done for task in tasks):
            page = report.write(out, console)
            console.print(f"wrote {page}", markup=False, soft_wrap=True)
    for task, error in failed:
        console.print(f"[red]failed:[/red] {escape(str(task.folder))}: {escape(error)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@app.command("report")
def report_(folder: Annotated[Path, typer.Argument(help="A folder with runs, of `mslmn reproduce`.")]) -> None:
    """Report on the runs in a folder again: tables here and as Markdown and JSON, one HTML page.

    Example:

    mslmn report runs
    """
    from . import report

    console = Console()
    with _told(console):
        page = report.write(folder, console)
    console.print(f"wrote {page}", markup=False, soft_wrap=True)


class Preparable(StrEnum):
    """What `mslmn prepare` can write."""

    words = "words"
    handwriting = "handwriting"


@app.command()
def prepare(
    what: Annotated[Preparable, typer.Argument(help="Which data.")],
    out: Annotated[Path | None, typer.Option(help="The .npz file to write; words.npz, by default, and so on.")] = None,
    timit: Timit = None,
    words: WordList = None,
    iam_ondb: IamOndb = None,
    pendigits: Pendigits = None,
    fold: Annotated[
        str | None, typer.Option(help="Handwriting: 2/4: the second fourth of all writers of pendigits tests.")
    ] = None,
    lines: Lines = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Handwriting: draws the lines.")] = None,
    features: Features = None,
    alphabet: AlphabetChoice = None,
) -> None:
    """Read recordings or pen strokes once and write features, for machines that have only torch.

    Examples:

    mslmn prepare words --timit /data/TIMIT --out words.npz

    mslmn reproduce words --prepared words.npz

    mslmn prepare handwriting --iam-ondb /data/IAM-OnDB --features offsets --out iam.npz

    mslmn prepare handwriting --lines 5000 --seed 1 --out synthetic.npz
    """
    console = Console()
    out = Path(f"{what.value}.npz") if out is None else out
    with _told(console):
        _check_file(out)  # before all recordings are read, not after
        if what is Preparable.words:
            _check_unused(
                what.value,
                iam_ondb=iam_ondb,
                pendigits=pendigits,
                fold=fold,
                lines=lines,
                seed=seed,
                features=features,
                alphabet=alphabet,
            )
            message = _prepare_words(out, timit, words)
        else:
            _check_unused(what.value, timit=timit, words=words)
            message = _prepare_handwriting(out, iam_ondb, pendigits, fold, lines, seed, features, alphabet)
    console.print(f"wrote {out}: {message}", markup=False, soft_wrap=True)


def _prepare_words(out: Path, timit: Path | None, words: Path | None) -> str:
    from .data import words as spoken

    found = _words(timit, words, None)
    spoken.keep(out, found)
    return f"{len(found.labels)} clips of {len(found.classes)} words"


def _prepare_handwriting(
    out: Path,
    iam_ondb: Path | None,
    pendigits: Path | None,
    fold: str | None,
    lines: int | None,
    seed: int | None,
    features: FeatureKind | None,
    alphabet: AlphabetKind | None,
) -> str:
    from .data import handwriting

    options: dict[str, Any] = {"lines": lines, "seed": seed, "features": features, "alphabet": alphabet}
    found = _handwriting(iam_ondb, pendigits, None, fold=fold, **options)
    handwriting.keep(out, found)
    counts = ", ".join(f"{found.splits.count(split):,} for {split}" for split in handwriting.SPLITS)
    steps = sum(map(len, found.features)) / len(found.features)
    return f"{counts}; {steps:.0f} steps a line, {found.alphabet.outputs} outputs"


def _handwriting(
    iam_ondb: Path | None,
    pendigits: Path | None,
    prepared: Path | None,
    *,
    fold: str | None = None,
    lines: int | None = None,
    seed: int | None = None,
    features: FeatureKind | None = None,
    alphabet: AlphabetKind | None = None,
    words: tuple[int, int] = (3, 8),
) -> Any:
    from .data import handwriting, writer
    from .data import iam_ondb as corpus  # fmt: skip
    from .data import pendigits as digits

    if prepared is not None:
        if iam_ondb or pendigits or lines is not None or features or alphabet:
            raise ValueError(
                "--prepared has its lines and features already; leave out --iam-ondb, --pendigits, --lines, --features "
                "and --alphabet"
            )
        return handwriting.load(prepared)
    others = {"--pendigits": pendigits, "--fold": fold, "--lines": lines, "--seed": seed}
    given = [option for option, value in others.items() if value is not None]
    if iam_ondb is not None and given:
        raise ValueError(f"--iam-ondb has its own lines; leave out {', '.join(given)}")
    if fold is not None and pendigits is None:
        raise ValueError("--fold is of the writers of pendigits; pass --pendigits too, or leave it out")
    default = AlphabetKind.paper
    if iam_ondb is not None:
        found, name = corpus.lines(iam_ondb), f"the lines of {iam_ondb.resolve().name}"
    elif pendigits is not None:
        found, name = (
            digits.lines(pendigits, lines, seed or 0, fold),
            f"strings of digits of {pendigits.resolve().name}, {f'fold {fold}, ' if fold else ''}seed {seed or 0}",
        )
        default = AlphabetKind.all
    else:
        found, name = writer.lines(lines or 1000, seed or 0, words), f"synthetic lines, seed {seed or 0}"
    return handwriting.prepare(
        found, name, features=(features or FeatureKind.absolute).value, alphabet=(alphabet or default).value
    )


def _check_unused(what: str, **options: object) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} is not for {what}; leave it out")


class Searchable(StrEnum):
    """What `mslmn search` can search."""

    words = "words"


class Space(StrEnum):
    """What `mslmn search` draws from."""

    paper = "paper"
    best = "best"


@app.command()
def search(
    what: Annotated[Searchable, typer.Argument(help="Which experiment.")],
    trials: Annotated[int, typer.Option(min=1, help="Of each model.")] = 20,
    storage: Annotated[
        str, typer.Option(help="Where trials are kept: a database's URL, or a file for a journal.")
    ] = "sqlite:///search.db",
    jobs: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    models: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    space: Annotated[Space, typer.Option(help="paper: its ranges; best: also what is ours.")] = Space.best,
    split: Annotated[int, typer.Option(min=0, max=9, help="Whose training clips.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Draws the trials.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of each training, or each stage of it; by batch size, by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The JSON file for the best of each model.")] = Path("search.json"),
    timit: Timit = None,
    words: WordList = None,
    prepared: Prepared = None,
    device: Device = None,
) -> None:
    """Search hyper-parameters at random over the paper's ranges, on training clips only.

    Stopped, it goes on where it was; several processes, or machines that reach one storage, share the trials. Examples:

    mslmn search words --trials 20 --jobs 2

    mslmn search words --models MS-LMN --storage postgresql://user@host/search
    """
    from tempfile import TemporaryDirectory

    from .data import words as spoken
    from .experiments import search as searching  # fmt: skip
    from .experiments import words as spoken_words

    console = Console()
    with _told(console), TemporaryDirectory() as folder, console.status("searching"):
        chosen = _models(models, spoken_words.MODELS, False)
        _check_device(device)
        _check_file(out)  # before hours of searching, not after
        _make_folder(out.parent)
        data = spoken.keep(Path(folder) / "words.npz", _words(timit, words, prepared))
        try:
            found = searching.search(
                data,
                chosen,
                storage,
                trials=trials,
                which=space.value,
                split=split,
                seed=seed,
                epochs=epochs,
                jobs=jobs,
                device=device,
            )
        except KeyboardInterrupt:
            console.print("stopped: finished trials are kept; the same command goes on", markup=False)
            raise typer.Exit(130) from None
        except searching.Failed as error:
            console.print(f"[red]failed:[/red] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from None
        searching.export(found, out)
    table = Table("model", "accuracy", "trials", "pruned", "settings", title="the best of each", title_justify="left")
    for model, best in found.items():
        settings = ", ".join(f"{name} {value}" for name, value in best["settings"].items())
        table.add_row(model, f"{best['accuracy']:.3f}", str(best["completed"]), str(best["pruned"]), settings)
    console.print(table)
    console.print(f"wrote {out}", markup=False, soft_wrap=True)


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """What the user can put right is said in one line, without a traceback; status 2, as for a wrong option."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(
            f"warning: {_printable(message)}", markup=False, soft_wrap=True
        )
        try:
            yield
        except (ValueError, ImportError, OSError) as error:
            Console(stderr=True).print(f"[red]error:[/red] {escape(_printable(error))}", soft_wrap=True)
            raise typer.Exit(2) from None


def _printable(message: object) -> str:
    """Lines that any terminal can show, whatever bytes the names of files have."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(message))


def _check_folder(out: Path, resume: bool) -> None:
    there = out.is_dir() and any(out.iterdir())
    if there and not resume:
        raise ValueError(f"{out} is not empty; add --resume to go on with the runs there, or choose another --out")
    _check_writable(out, out)


def _check_file(out: Path) -> None:
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it")
    _check_writable(out, out.parent)


def _check_writable(out: Path, folder: Path) -> None:
    """Folders are made when there is something to write."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"cannot make {out} in {nearest}; choose a folder you can write to")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make {folder} ({error.strerror}); choose a folder you can write to") from None


def _check_device(wish: str | None) -> None:
    if wish is None:
        return
    try:
        torch.empty(0, device=wish)
    except (RuntimeError, AssertionError) as error:  # no such device; torch without CUDA
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {wish!r} here ({why}); choose cpu, or what mslmn doctor lists") from None


def _on_gpu(device: str, what: Benchmark, require: bool) -> bool:
    """Whether `bench` is to run on a GPU, which is there and becomes the current one."""
    if device == "cpu":
        if require:
            raise ValueError("--require is for a GPU: no ratio is required of a CPU; add --device cuda")
        return False
    if not device.startswith("cuda") or what is Benchmark.autoencoder:
        raise ValueError(f"the {what.value} is not measured on {device!r}; layers are on cpu and cuda, the rest on cpu")
    _check_device(device)
    index = torch.device(device).index
    if index is not None:
        torch.cuda.set_device(index)
    return True


def _models(wish: str | None, known: tuple[str, ...], some: bool) -> tuple[str, ...]:
    """Those wished for; ``some``: as far as the experiment has them."""
    from .experiments.models import NAMES

    if wish is None:
        return known
    names = {name.lower(): name for name in (NAMES if some else known)}
    wanted = [name.strip().lower() for name in wish.split(",")]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ValueError(f"there is no model {', '.join(unknown)} here; choose of {', '.join(names.values())}")
    return tuple(name for name in known if name.lower() in wanted)


def _budgets(wish: str | None) -> tuple[int, ...] | None:
    from .experiments.paper import BUDGETS

    if wish is None:
        return None
    try:
        wanted = tuple(dict.fromkeys(int(text) for text in wish.split(",")))
    except ValueError:
        wanted = (0,)
    if not set(wanted) <= set(BUDGETS):
        raise ValueError(
            f"budgets must be of {', '.join(map(str, BUDGETS))}, got {wish}; name some of them, separated by commas"
        )
    return wanted


def _words(timit: Path | None, words: Path | None, prepared: Path | None) -> Any:
    from .data import words as spoken

    if prepared is not None:
        if timit or words:
            raise ValueError("--prepared has the words already; leave out --timit and --words")
        return spoken.load(prepared)
    if timit is not None:
        return spoken.from_timit(timit, None if words is None else spoken.word_list(words))
    if words is not None:
        raise ValueError("--words needs --timit: the package has only the paper's 25 words")
    return spoken.embedded()


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
