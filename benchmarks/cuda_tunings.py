"""Correctness in short, then times of the CUDA optimizer kernels, for several tunings. Run in the repository root:

    python3 benchmarks/cuda_tunings.py [--only check,adam,norm,lamb,clip,host] [--quick] [--no-check] [--budget SECONDS]

Bytes: AdamW and LAMB count 28 B/element (p, m, v fp32 read and written; bf16 grad read; bf16 copy written), the norm 2.
Every figure is a share of what torch's copy_ moves in the same manner (same bytes read + written, same way of timing).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, ".")

import torch
from optimizers import segments

from ds_hf.engine.ops import cuda, cuda_lamb, cuda_launch, reference
from ds_hf.engine.ops.cuda_launch import Tuning

START = time.time()
M = 1_000_000
DEV = "cuda"
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
LAMB = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-6,
    "eps_inside_sqrt": False,
    "weight_decay": 0.01,
    "bias_correction": True,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
}
LLAMA_LAYER = [2048 * 2048] * 4 + [5504 * 2048] * 3 + [2048] * 2


def say(*text):
    print(f"[{time.time() - START:6.1f}s]", *text, flush=True)


class Job:
    """One set of AdamW/LAMB tensors."""

    def __init__(self, numels):
        self.numel = sum(numels)

        def flat(dtype, positive=False):
            values = (torch.rand if positive else torch.randn)(self.numel, device=DEV)
            return list(values.to(dtype).split(numels))

        self.p, self.m, self.v = flat(torch.float32), flat(torch.float32), flat(torch.float32, True)
        self.g, self.o = flat(torch.bfloat16), flat(torch.bfloat16)
        self.s = [torch.tensor(5.0, device=DEV) for _ in numels]
        self.control = torch.tensor([1.0, 0.0], device=DEV)

    def adam(self):
        cuda.adam_(self.p, self.g, self.m, self.v, self.o, self.s, self.control, **ADAM)

    def norm(self):
        return cuda.squared_norm(self.g)

    def clipped(self):
        """Norm, clip factor into control on the device, update."""
        control = cuda.norm_control(self.g, scale=1.0, max_norm=1.0, checked=False)[:2]
        cuda.adam_(self.p, self.g, self.m, self.v, self.o, self.s, control, **ADAM)

    def lamb(self):
        cuda.lamb_(self.p, self.g, self.m, self.v, self.o, self.s, self.control, **LAMB)

    def lamb_two(self):
        first = {k: LAMB[k] for k in ("beta1", "beta2", "eps", "eps_inside_sqrt", "weight_decay")}
        norms = cuda.lamb_moments_(self.p, self.g, self.m, self.v, self.control, **first)
        cuda.lamb_apply_(self.p, self.m, self.v, self.o, self.s, norms, self.control, **LAMB)


def sets_for(numels):
    """As many sets as go beyond the L2 cache several times over, at least one."""
    nbytes = 16 * sum(numels)
    return [Job(numels) for _ in range(max(1, min(24, int(300e6 // nbytes))))]


def timed(calls, seconds=0.08, graph=True):
    """Microseconds of one call, on average over all of ``calls``: (queued, replayed from a graph)."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()

    def run(fn, n):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n):
            fn()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def every():
        for call in calls:
            call()

    one = run(every, 1)
    n = max(2, min(200, int(seconds * 1e6 / max(one, 1))))
    queued = min(run(every, n) for _ in range(3)) / n / len(calls)
    if not graph:
        return queued, queued
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        every()
    captured.replay()
    replayed = min(run(captured.replay, n) for _ in range(3)) / n / len(calls)
    del captured
    return queued, replayed


def copy_us(nbytes):
    """Of a copy that moves ``nbytes``, counting reads and writes, over buffers beyond the L2."""
    n = int(nbytes // 2)
    count = max(1, min(24, int(300e6 // n)))
    pairs = [
        (torch.randint(0, 255, (n,), dtype=torch.uint8, device=DEV), torch.empty(n, dtype=torch.uint8, device=DEV))
        for _ in range(count)
    ]
    calls = [lambda a=a, b=b: b.copy_(a) for a, b in pairs]
    return min(timed(calls))  # a copy in a graph may go to a slower engine


@contextlib.contextmanager
def tuned(**kinds):
    machine = cuda_launch.gpu(torch.cuda.current_device())
    before = machine.tunings
    machine.tunings = replace(before, **kinds)
    try:
        yield
    finally:
        machine.tunings = before


def relative(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def check():
    numels = [1, 7, 4097, 1_000_003, 3_000_000]
    for name in ("adam", "lamb", "lamb_two"):
        job = Job(numels)
        want = [[t.double() for t in ts] for ts in (job.p, job.g, job.m, job.v)]
        getattr(job, name)()
        if name == "adam":
            reference.adam_(*want, [], job.s, job.control, **ADAM)
        else:
            reference.lamb_(*want, [], job.s, job.control, **LAMB)
        errors = [
            max(relative(a, b) for a, b in zip(x, y, strict=False))
            for x, y in zip((job.p, job.m, job.v), (want[0], want[2], want[3]), strict=False)
        ]
        outs = all(torch.equal(o, p.bfloat16()) for o, p in zip(job.o, job.p, strict=False))
        ok = max(errors) < 1e-5 and outs
        say(f"check {name}: errors {' '.join(f'{e:.1e}' for e in errors)} outs {outs} {'ok' if ok else 'WRONG'}")
    job = Job(numels)
    want = sum(float(g.double().square().sum()) for g in job.g)
    say(f"check norm: {abs(float(job.norm()) - want) / want:.1e}")


def host():
    """Microseconds of a call on the host, with nothing for the GPU to do but little."""
    for count in (1, 60, 500):
        job = Job([64] * count)
        for name in ("adam", "norm", "lamb", "lamb_two"):
            call = getattr(job, name)
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            n, best = 50, 1e9
            for _ in range(5):
                begin = time.perf_counter()
                for _ in range(n):
                    call()
                best = min(best, (time.perf_counter() - begin) / n * 1e6)
                torch.cuda.synchronize()
            say(f"host {name:9s} {count:4d} tensors of 64: {best:7.1f} us a call")


def row(label, numel, per, copy, queued, replayed):
    say(
        f"{label:44s} {numel / M:7.1f} M  graph {replayed:9.1f} us {per * numel / replayed / 1e6:6.2f} TB/s {copy / replayed:6.1%}   queued {queued:9.1f} us {copy / queued:6.1%}"  # noqa: E501
    )
    return copy / replayed


def adam_tunings(quick):
    shapes = [(256, 3, 2), (256, 4, 1), (256, 2, 2), (128, 6, 2), (512, 2, 1), (256, 6, 1), (128, 8, 1), (1024, 1, 1)]
    found = [Tuning(threads=t, blocks=b, groups=g, exact=e) for (t, b, g), e in itertools.product(shapes, (1, 0))]
    found += [Tuning(stream=0), Tuning(threads=256, blocks=4, groups=1, stream=0)]
    found += [Tuning(waves=w) for w in (2, 1000)] + [
        Tuning(threads=256, blocks=4, groups=1, waves=w) for w in (2, 1000)
    ]
    found += [Tuning(threads=256, blocks=3, vec=8, groups=1), Tuning(threads=128, blocks=6, vec=8, groups=1)]
    return found[:6] if quick else found


def adam(budget, quick):
    sizes = [1 * M, 4 * M, 16 * M, 64 * M, 500 * M]
    copies = {n: copy_us(28 * n) for n in sizes}
    say("copy TB/s:", {n // M: round(28 * n / us / 1e6, 2) for n, us in copies.items()})
    score = {}
    for size in (64 * M, 1 * M):
        jobs = sets_for([size])
        for tuning in adam_tunings(quick):
            if time.time() - START > budget:
                say("no time left for tunings")
                break
            with tuned(update=tuning):
                queued, replayed = timed([job.adam for job in jobs], seconds=0.04)
            share = row(
                f"adam {tuning.threads}x{tuning.blocks} vec{tuning.vec}x{tuning.groups} cs{tuning.stream} w{tuning.waves} exact{tuning.exact}",  # noqa: E501
                size,
                28,
                copies[size],
                queued,
                replayed,
            )
            score.setdefault(tuning, []).append(share)
        del jobs
    complete = {t: s for t, s in score.items() if len(s) == 2}
    best = max(complete or score, key=lambda t: sum(score[t]))
    say("BEST adam tuning:", best, [f"{s:.1%}" for s in score[best]])
    return best, copies


def adam_sizes(best, copies):
    for size, copy in copies.items():
        jobs = sets_for([size])
        with tuned(update=best):
            row("adam best", size, 28, copy, *timed([job.adam for job in jobs]))
            row("adam best + norm + clip", size, 28, copy, *timed([job.clipped for job in jobs]))
        del jobs
        torch.cuda.empty_cache()
    for label, numels in (
        ("500 tensors of 2 K", [2048] * 500),
        ("500 of 32 K", [32768] * 500),
        ("Llama layer", LLAMA_LAYER),
        ("odd starts", None),
    ):
        if numels is None:
            jobs = sets_for([16 * M + 1])
            for job in jobs:
                job.g, job.o = [job.g[0][1:]], [job.o[0][1:]]
                job.p, job.m, job.v = [job.p[0][:-1]], [job.m[0][:-1]], [job.v[0][:-1]]
            numels = [16 * M]
        else:
            jobs = sets_for(numels)
        copy = copy_us(28 * sum(numels))
        for capacity in (60, 500):
            with tuned(update=replace(best, capacity=capacity)):
                row(f"adam {label}, {capacity} a launch", sum(numels), 28, copy, *timed([job.adam for job in jobs]))


def norms(quick):
    for size in (1 * M, 64 * M, 500 * M):
        copy = copy_us(2 * size)
        jobs = sets_for([size])
        grads = jobs if size > 8 * M else jobs + sets_for([size])
        for tuning in [
            Tuning(threads=t, blocks=b, groups=g)
            for t, b, g in ((256, 6, 4), (256, 4, 4), (256, 8, 2), (512, 3, 4), (256, 8, 1), (128, 12, 4))
        ][: 3 if quick else 6]:
            with tuned(norm=tuning):
                row(
                    f"norm {tuning.threads}x{tuning.blocks}x{tuning.groups}",
                    size,
                    2,
                    copy,
                    *timed([job.norm for job in grads], seconds=0.03),
                )
        del jobs, grads


# LAMB as a stream of tiles: `own` has what differs from 992 threads, one vector each. The first is the kernel before.
BEFORE = Tuning(threads=1024, blocks=1, groups=1, exact=0, held=3)
STREAMS = [
    {"threads": 480, "groups": 2},
    {},
    {"scratch": 8},
    {"scratch": 8, "keep": 2},
    {"scratch": 8, "keep": 3},
    {"keep": 1},
    {"fetch": 1},
    {"ahead": 1},
    {"ahead": 4},
    {"threads": 480, "groups": 2, "held": 2},
    {"threads": 480, "groups": 2, "scratch": 8},
    {"threads": 480, "groups": 2, "scratch": 8, "keep": 3},
    {"threads": 480, "groups": 2, "ahead": 4},
    {"threads": 480, "groups": 2, "held": 2, "fetch": 1},
    {"threads": 480, "groups": 2, "held": 2, "keep": 1},
    {"threads": 736, "held": 4},
    {"threads": 736, "held": 3, "scratch": 8, "keep": 2},
    {"threads": 864},
    {"threads": 608, "held": 6},
    {"threads": 224, "groups": 4, "held": 2},
    {"threads": 480, "blocks": 2, "scratch": 8},
]


def on_device(calls, seconds=0.02):
    """Microseconds of one call, of calls that were queued before the first one began; the best of three rounds."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    rounds, n = [], max(3, len(calls))
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000 + 80_000 * n)  # the host gets ahead: some 50 us a call
        begin.record()
        for index in range(n):
            calls[index % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / n)
        if len(rounds) == 1:
            n = max(3, min(150, int(seconds * 1e6 / rounds[0])))
    return min(rounds[1:])


def copies_on_device(numel):
    count = max(1, min(24, int(500e6 // (28 * numel))))
    pairs = [torch.zeros(2, 14 * numel, dtype=torch.uint8, device=DEV) for _ in range(count)]
    return on_device([lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs])


@contextlib.contextmanager
def watched(what, seconds=20):
    """A kernel whose blocks wait for what never comes cannot be stopped otherwise."""

    def give_up():
        say(f"{what} HANGS: later ones can be had with --skip {what}")
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def checks():
    """LAMB's inputs, and what the reference makes of them; tiles, tails, many entries, one beyond the chip."""
    numels = [4097, 1_000_003, 5504 * 2048, 7, *[2048] * 60, 2048 * 2048, 0, 30_000_001]
    job = Job(numels)
    job.v = [v * 0.01 for v in job.v]
    want = [[t.double() for t in ts] for ts in (job.p, job.g, job.m, job.v)]
    reference.lamb_(*want, [], job.s, job.control, **LAMB)
    return job, (want[0], want[2], want[3])


def checked(job, want):
    """Raises if LAMB does not give what the reference gives, the same each time, or writes though told not to."""
    before = [[t.clone() for t in ts] for ts in (job.p, job.m, job.v)]
    results = []
    for flag in (1.0, 0.0, 0.0):
        for now, was in zip((job.p, job.m, job.v), before, strict=True):
            torch._foreach_copy_(now, was)
        job.control[1] = flag
        job.lamb()
        got = [*job.p, *job.m, *job.v, *job.o]
        if flag:
            assert all(torch.equal(a, b) for a, b in zip(got, itertools.chain(*before), strict=False)), "flag"
        else:
            results.append([t.clone() for t in got])
    for now, was in zip((job.p, job.m, job.v), before, strict=True):
        torch._foreach_copy_(now, was)
    assert all(map(torch.equal, *results)), "not the same bits the second time"
    n = len(job.p)
    params, outs = results[0][:n], results[0][3 * n :]
    assert all(torch.equal(o, p.bfloat16()) for o, p in zip(outs, params, strict=True)), "outs"
    worst = max(relative(a, b) for a, b in zip(results[0][: 3 * n], itertools.chain(*want), strict=True) if a.numel())
    assert worst < 1e-6, f"relative error {worst}"
    return worst


USUAL = cuda_lamb.STREAMED_NUMEL


def select(name):
    """Have the kernel of a variant take all sizes; what it is called in ``Tunings``."""
    cuda_lamb.STREAMED_NUMEL = 0 if name == "before" else 1 << 60
    return "lamb_fused" if name == "before" else "lamb_stream"


def named(own):
    return "-".join(f"{key[:2]}{value}" for key, value in own.items()) or "plain"


def lamb(budget, skip, quick):
    cases = {
        "1 M": [M],
        "2048x2048": [2048 * 2048],
        "5504x2048": [5504 * 2048],
        "Llama layer": LLAMA_LAYER,
        "500 M": segments(500 * M),
        "embeddings": [32000 * 2048] + LLAMA_LAYER * 7 + [32000 * 2048],
    }
    variants = {"before": BEFORE}
    for own in STREAMS[:: 3 if quick else 1]:
        variants[named(own)] = Tuning(**{"threads": 992, "blocks": 1, "groups": 1, "exact": 0, **own})
    job, want = checks()
    shares: dict[str, dict[str, float]] = {}
    for name, tuning in variants.items():
        if name in skip or time.time() - START > budget:
            say(f"{name} is left out")
            continue
        kind = select(name)
        began = time.time()
        try:
            with watched(name), tuned(**{kind: tuning}):
                worst = checked(job, want)
            shares[name] = {}
            say(f"check {name}: relative error {worst:.1e}, {time.time() - began:.1f} s with compilation")
        except Exception as error:
            say(f"{name} FAILED: {error!r}"[:300])
    del job, want
    torch.cuda.empty_cache()
    for label, numels in cases.items():
        numel = sum(numels)
        jobs = sets_for(numels)
        copy = copies_on_device(numel)
        for name in list(shares):
            if time.time() - START > budget:
                continue
            kind = select(name)
            with watched(name), tuned(**{kind: variants[name]}):
                shares[name][label] = copy / on_device([job.lamb for job in jobs])
        say(f"{label}: copy {copy:.1f} us, {28 * numel / copy / 1e6:.2f} TB/s")
        del jobs
        torch.cuda.empty_cache()
    cuda_lamb.STREAMED_NUMEL = USUAL
    print(f"{'LAMB, share of copy':34s}" + "".join(f"{label:>13s}" for label in cases))
    for name, of in sorted(shares.items(), key=lambda item: -item[1].get("500 M", 0)):
        print(f"{name:34s}" + "".join(f"{of[label]:13.1%}" if label in of else " " * 13 for label in cases))
    return shares


def clipping(budget):
    """AdamW with clipping for both ways to add up the norm, and tiles that the update fetches meanwhile."""
    norm, update = cuda_launch.Tunings().norm, cuda_launch.Tunings().update
    small = {"512x3": {}, "256x4": {"threads": 256, "blocks": 4}, "1024x1": {"threads": 1024, "blocks": 1}}
    variants = {f"messages {keep} fetch {fetch} 512x3": (keep, fetch, {}) for keep in (0, 1) for fetch in (0, 2, 4, 8)}
    variants |= {f"messages 1 fetch 8 {shape}": (1, 8, own) for shape, own in small.items()}
    shares: dict[str, dict[str, float]] = {}
    for size in (M, 4 * M, 500 * M):
        jobs, copy = sets_for([size]), copies_on_device(size)
        alone = on_device([job.adam for job in jobs])
        for name, (keep, fetch, own) in variants.items():
            if time.time() - START > budget:
                continue
            tunings = {"norm": replace(norm, keep=keep, **own), "update": replace(update, fetch=fetch)}
            try:
                with watched(name), tuned(**tunings):
                    got = cuda.norm_control(jobs[0].g, scale=1.0, max_norm=1.0, checked=True).tolist()
                    true = float(jobs[0].g[0].double().norm())
                    assert abs(got[2] / true - 1) < 1e-6, (got, true)
                    shares.setdefault(name, {})[f"{size // M} M"] = copy / on_device([job.clipped for job in jobs])
            except Exception as error:
                say(f"{name} FAILED: {error!r}"[:300])
        say(f"AdamW of {size // M} M alone: {copy / alone:.1%} of copy")
        del jobs
        torch.cuda.empty_cache()
    for name, of in sorted(shares.items(), key=lambda item: -item[1].get("1 M", 0)):
        print(f"AdamW + clip, {name:28s}" + "".join(f"{label:>8s} {share:.1%}" for label, share in of.items()))
    return shares


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--budget", type=float, default=210)
    parser.add_argument("--only", default="check,adam,norm,lamb,clip,host")
    parser.add_argument("--skip", default="", help="variants of LAMB to leave out, e.g. sc8,th864")
    options = parser.parse_args()
    say(torch.__version__, torch.cuda.get_device_name(), "available:", cuda.available() or "yes")
    only = options.only.split(",")
    if "check" in only and not options.no_check:
        check()
    if "adam" in only:
        best, copies = adam(options.budget * 0.4, options.quick)
        adam_sizes(best, copies)
    if "norm" in only:
        norms(options.quick)
    shares = {}
    if "lamb" in only:
        shares["lamb"] = lamb(options.budget * (0.8 if "clip" in only else 1), options.skip.split(","), options.quick)
    if "clip" in only:
        shares["clip"] = clipping(options.budget)
    if shares and "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "cuda_tunings.json").write_text(json.dumps(shares, indent=1))
    if "host" in only:
        host()


if __name__ == "__main__":
    main()
