"""Seconds of an epoch of handwriting, model by model, and what of them the GPU is busy with.

    mslmn prepare handwriting --lines 5000 --features offsets --out lines.npz
    python tools/time_epochs.py lines.npz

An epoch is what `fit` makes of it: batches, distortion, noise, CTC, clipping, Adam; not the validation after it. The
first one compiles and captures, and is left out.
"""

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from mslmn import training
from mslmn.data import handwriting as pen
from mslmn.experiments import handwriting


def stack(layers, hidden, memory, modules, layer_norm=True, pool=1):
    sizes = {"hidden": hidden, "memory": memory, "modules": modules}
    return "MS-LMN", {"layers": layers, "layer_norm": layer_norm, "pool": pool, **sizes}


MODELS = {
    "five layers of H64 M17 g2": stack(5, 64, 17, 2),
    "four layers of H72 M20 g2": stack(4, 72, 20, 2),
    "three layers of H84 M24 g2": stack(3, 84, 24, 2),
    "the same without norms": stack(3, 84, 24, 2, layer_norm=False),
    "three layers of H117 M18 g2": stack(3, 117, 18, 2),
    "three layers of H155 M14 g2": stack(3, 155, 14, 2),
    "three pooled layers of H155 M14 g2": stack(3, 155, 14, 2, pool=2),
    "H144 M16 g9": stack(1, 144, 16, 9),
    "H96 M48 g3": stack(1, 96, 48, 3),
    "LSTM(102)": ("LSTM", {}),
}


class Timed(training._Run):
    seconds: list[float]
    busy: "Counter[str]"  # microseconds of the last epoch, by kernel

    def _train_epoch(self, step, batches):
        last = self.state.epoch == self.plan.epochs - 1 and self.device.type == "cuda"
        if not last:
            super()._train_epoch(step, batches)
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            super()._train_epoch(step, batches)
            torch.cuda.synchronize()
        Timed.busy = Counter({e.key: e.self_device_time_total for e in profile.key_averages()})

    def epoch_done(self, train_loss, seconds):
        Timed.seconds.append(seconds)
        super().epoch_done(train_loss, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what mslmn prepare handwriting wrote")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--epochs", type=int, default=5, help="the last one is watched, and not timed")
    parser.add_argument("--device")
    parser.add_argument("--kernels", type=int, default=5, help="how many of the longest are told")
    o = parser.parse_args()
    data = pen.load(o.data)
    training._Run = Timed
    for name in o.models:
        model, changed = MODELS[name]
        chosen = replace(handwriting.settings(model, "best", o.epochs, data.kind), flat_start=0, **changed)
        Timed.seconds, Timed.busy = [], Counter()
        handwriting.fitted(model, chosen, data, 0, None, o.device)
        timed = Timed.seconds[1 : -1 if Timed.busy else None]
        print(f"{name}: {', '.join(f'{s:.3f}' for s in timed)} s", end="")
        if Timed.busy:
            batches = -(-data.splits.count("train") // chosen.batch_size)
            print(f"; the GPU is busy for {Timed.busy.total() / 1e3 / batches:.2f} ms of each of {batches} batches")
            for kernel, time in Timed.busy.most_common(o.kernels):
                print(f"    {time / 1e3 / batches:.3f} ms {kernel[:100]}")
        print(flush=True)


if __name__ == "__main__":
    main()
