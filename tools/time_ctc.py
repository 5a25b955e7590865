"""torch's CTC against ours on a GPU, loss and gradient: times of GPU, host and each kernel, and errors against float64;
then ours in other layouts.

    python tools/time_ctc.py
"""

import time

import torch
from torch.nn.utils.rnn import pack_sequence

import mslmn
from mslmn.objectives import CTC
from mslmn.ops import ctc

DEVICE, STEPS = torch.device("cuda", 0), 50


def problem(T, B, O, L, unequal, seed=0):
    torch.manual_seed(seed)
    lengths = [T - (i * T // (4 * B) if unequal else 0) for i in range(B)]
    target = [torch.randint(1, O, (L - (i % 5 if unequal else 0),)) for i in range(B)]
    return pack_sequence([torch.randn(n, O, device=DEVICE) for n in lengths]), target


def step(packed, target):
    data = packed.data.detach().requires_grad_()
    loss = CTC().loss(packed._replace(data=data), target)
    (loss.total / loss.items).backward()
    return loss.total.detach(), data.grad


def measure(packed, target, steps=STEPS):
    """Of a step: milliseconds by events, by wall clock, and on the GPU alone, kernel by kernel."""
    for _ in range(5):
        step(packed, target)
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin = time.perf_counter()
    a.record()
    for _ in range(steps):
        step(packed, target)
    b.record()
    enqueued = (time.perf_counter() - begin) * 1e3 / steps
    torch.cuda.synchronize()
    wall, events = (time.perf_counter() - begin) * 1e3 / steps, a.elapsed_time(b) / steps
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(20):
            step(packed, target)
        torch.cuda.synchronize()
    kernels = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    gpu = {name: (sum(times) / 20, len(times) / 20) for name, times in kernels.items()}
    return events, wall, enqueued, gpu


def alone(packed, target):
    """Of ours, milliseconds between events around its three launches, behind a pause that lets the queue fill."""
    data = packed.data.detach().requires_grad_()
    targets = ctc.prepare(torch.cat(target), [len(t) for t in target], packed.batch_sizes, DEVICE)
    times = []
    for _ in range(20):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        a.record()
        ctc.loss(data, targets)
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def main():
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here, and on the CPU both are torch's")
    print(torch.cuda.get_device_name(0), torch.__version__)
    for T, B, O, L in [(600, 32, 58, 35), (220, 32, 12, 6), (600, 256, 58, 35)]:
        for unequal in (False, True):
            packed, target = problem(T, B, O, L, unequal)
            counts = [len(t) for t in target]
            if not ctc.takes(DEVICE, packed.batch_sizes, counts):
                raise SystemExit("the CUDA kernels cannot be had here; mslmn doctor tells why")
            print(f"\n== T {T}, B {B}, O {O}, {L} labels{', unequal' if unequal else ''}")
            with mslmn.set_backend("torch"):
                exact = step(packed._replace(data=packed.data.double()), target)
            results = {}
            for name in ("torch", "cuda"):
                with mslmn.set_backend(name):
                    results[name] = step(packed, target)
                    events, wall, enqueued, gpu = measure(packed, target)
                errors = [relative(x, y) for x, y in zip(results[name], exact, strict=True)]
                total = sum(t for t, _ in gpu.values()) / 1e3
                print(
                    f"{name}: events {events:.3f} ms, wall {wall:.3f} ms, host until enqueued {enqueued:.3f} ms, "
                    f"GPU {total:.3f} ms in {sum(n for _, n in gpu.values()):.0f} launches and copies; "
                    f"relative errors: loss {errors[0]:.1e}, gradient {errors[1]:.1e}"
                )
                for kernel, (t, n) in sorted(gpu.items(), key=lambda item: -item[1][0])[:8]:
                    print(f"    {t:8.1f} us  x{n:.0f}  {kernel[:90]}")
            again = step(packed, target)
            print("same bits again:", all(torch.equal(a, b) for a, b in zip(again, results["cuda"], strict=True)))
            print(f"forward with gradient, queue full: {alone(packed, target):.3f} ms")
    print("\n== layouts (pairs, warps, ahead): forward with gradient, ms")
    choose = ctc.choose
    for (T, B, O, L), layouts in {
        (600, 32, 58, 35): [(2, 1, 2), (2, 1, 4), (2, 1, 8), (2, 1, 12), (1, 2, 4), (1, 2, 8), (4, 1, 4)],
        (220, 32, 12, 6): [(1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 1, 16), (2, 1, 8)],
        (1500, 32, 58, 120): [(2, 2, 8), (4, 1, 4), (4, 1, 8), (1, 4, 8), (2, 2, 4)],
        (2500, 32, 58, 300): [(2, 8, 8), (4, 4, 4), (4, 4, 8), (8, 2, 4), (2, 8, 4)],
    }.items():
        packed, target = problem(T, B, O, L, False)
        for layout in layouts:
            ctc.choose = lambda longest, layout=layout: ctc.Layout(*layout)
            alone(packed, target)
            print((T, B, O, L), layout, f"{alone(packed, target):.3f}")
        ctc.choose = choose


if __name__ == "__main__":
    main()
