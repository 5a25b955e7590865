"""Memorise a real signal, decode it back, and see how far the memory reaches.

    python examples/memorise.py                    the lines of a photograph, which scikit-learn has
    python examples/memorise.py RECORDING.wav      a recording of your own (.flac, .ogg: needs soundfile)

Prints the error by lag and writes memorise.png (needs matplotlib).
"""

import argparse
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.io import wavfile
from sklearn.datasets import load_sample_image

import mslmn

SIZES = (8, 32, 128)  # components, at the middle horizon
HORIZONS = (25, 100, 400)  # steps, at the middle size
SHOWN = (0, 10, 50, 90)  # lags in the table


def photograph() -> np.ndarray:
    """(427, 640, 3): a line of the picture is a sequence, a pixel a step."""
    return load_sample_image("china.jpg") / 255.0


def recording(path: Path) -> np.ndarray:
    """(1, T, channels), at most five seconds."""
    if path.suffix.lower() == ".wav":
        rate, samples = wavfile.read(path)
    else:
        import soundfile

        samples, rate = soundfile.read(path)
    samples = np.asarray(samples, dtype=np.float64).reshape(len(samples), -1)[: 5 * rate]
    return samples[None] / max(np.abs(samples).max(), 1e-12)


def fit(X: np.ndarray, size: int, horizon: int) -> tuple[mslmn.LinearAutoencoder, np.ndarray]:
    """The autoencoder, and its error at each lag."""
    start = time.perf_counter()
    memory = mslmn.LinearAutoencoder(size, horizon=horizon, center=True, random_state=0).fit(X)
    seconds = time.perf_counter() - start
    errors = memory.reconstruction_error(X[:, -20 * horizon :], states="all")
    at = "  ".join(f"{errors[lag]:.3f}" if lag < horizon else "  -  " for lag in SHOWN)
    kept = (memory.singular_values_**2).sum() / memory.energy_
    print(f"{size:4} components, {horizon:4} steps   {at}   {kept:6.1%}   {seconds:5.2f} s ({memory.solver_})")
    return memory, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("memorise.png"))
    arguments = parser.parse_args()
    X = photograph() if arguments.recording is None else recording(arguments.recording)

    print(f"{X.shape[0]} sequences, {X.shape[1]} steps, {X.shape[2]} features")
    print(f"{'relative error at lag':30}" + "  ".join(f"{lag:5}" for lag in SHOWN) + "   energy")
    by_size = {size: fit(X, size, HORIZONS[1]) for size in SIZES if size <= HORIZONS[1] * X.shape[2]}
    by_horizon = {horizon: fit(X, SIZES[1], horizon) for horizon in HORIZONS if SIZES[1] <= horizon * X.shape[2]}

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 4, gridspec_kw={"height_ratios": (1.2, 1)})
    past = X[:, -HORIZONS[1] :]
    shown = [("the signal", past)]
    for size, (memory, _) in by_size.items():
        shown.append((f"from {size} numbers", memory.inverse_transform(memory.transform(X), HORIZONS[1])))
    for panel, (title, values) in zip(panels[0], shown, strict=False):
        if len(X) > 1:
            panel.imshow(values.clip(0, 1), aspect="auto", extent=(-HORIZONS[1], 0, 0, len(X)))
        else:
            panel.plot(np.arange(-HORIZONS[1], 0), past[0], color="0.75", linewidth=3)
            panel.plot(np.arange(-HORIZONS[1], 0), values[0], color="#1b6ca8", linewidth=1)
            panel.set_ylim(1.2 * past.min(), 1.2 * past.max())
        panel.set(title=title, xlabel="steps before the end", yticks=[])
    for panel in (*panels[0, len(shown) :], *panels[1]):
        panel.remove()
    grid = panels[0, 0].get_gridspec()
    for columns, fits, label in ((slice(0, 2), by_size, "{} numbers"), (slice(2, 4), by_horizon, "horizon {}")):
        panel = figure.add_subplot(grid[1, columns])
        for shade, (value, (_, errors)) in zip(("#9cc3e0", "#1b6ca8", "#0b2e4a"), fits.items(), strict=False):
            panel.plot(np.arange(len(errors)), errors, color=shade, label=label.format(value))
        panel.set(xlabel="lag, steps", ylabel="relative error", ylim=(0, 1.1))
        panel.set_title(f"horizon {HORIZONS[1]}" if fits is by_size else f"{SIZES[1]} numbers")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    temporary = arguments.out.with_name(arguments.out.name + ".tmp")
    figure.savefig(temporary, format=arguments.out.suffix[1:] or "png", dpi=130)
    temporary.replace(arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
