#!/usr/bin/env python3
"""Products of rows with stored weights through PyTorch, which calls cuBLAS: the peer of the bench `linear`.

    python3 benches/peers/peer_cublas.py [--shapes FILE] [--model NAME,..] [--json FILE]

Each product runs in a CUDA graph over enough sets of inputs that no cache keeps them. `gate_up+silu` is the product and
then the activation, three kernels.
"""
import argparse
import json
import math
import os
import statistics

import torch
import torch.nn.functional as F

ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
MANY_ROWS = 512
L2_BYTES = 60 * 2**20
HERE = os.path.dirname(os.path.abspath(__file__))


def event_ms(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(calls, window_ms=2.0, samples=15):
    """Median microseconds of one call: out of replays of a graph that goes through all of them, and of calls that are queued.

    Queued calls come first and for as long as in the bench, so that the card is as warm when the graph runs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    once = max(event_ms(calls[0]), 1e-3)

    def queue():
        for at in range(queued):
            calls[at % len(calls)]()

    queued = math.ceil(min(window_ms / once, 100))
    us_queued = statistics.median(event_ms(queue) for _ in range(samples)) / queued * 1e3
    count = max(len(calls), math.ceil(min(window_ms / once, 256)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(count):
            calls[at % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median(event_ms(graph.replay) for _ in range(samples)) / count * 1e3, us_queued


def numbers(rows, columns):
    """The distribution that the bench fills tensors with: what the bits are decides how much power a product takes."""
    return (torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int16) / 64).to(torch.bfloat16)


def products(model, rows):
    hidden, ffn = model["hidden"], model["ffn"]
    q, kv = model["q_heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    yield "qkv", q + 2 * kv, hidden
    yield "o", hidden, q
    yield "gate_up", 2 * ffn, hidden
    yield "gate_up+silu", 2 * ffn, hidden
    yield "down", hidden, ffn
    if rows < MANY_ROWS:
        yield "lm_head", model["vocab"], hidden


def run(head, name, rows, out, inner):
    gated = name.endswith("silu")
    columns = out // 2 if gated else out
    size = 2 * (rows * (inner + columns) + out * inner)
    sets = max(1, min(16, math.ceil(3 * L2_BYTES / size)))
    x = [numbers(rows, inner) for _ in range(sets)]
    w = [numbers(out, inner) for _ in range(sets)]
    y = torch.empty(rows, out, device="cuda", dtype=torch.bfloat16)

    def call(at):
        if not gated:
            return torch.mm(x[at], w[at].t(), out=y)
        gate, up = torch.mm(x[at], w[at].t(), out=y).chunk(2, 1)
        return F.silu(gate) * up

    us, us_queued = measure([lambda at=at: call(at) for at in range(sets)])
    flops = 2.0 * rows * inner * out
    return {
        "kind": "linear_many_rows" if rows >= MANY_ROWS else "linear",
        "head": head,
        "case": f"{rows}x{rows}x{rows}" if name == "square" else f"{name} rows={rows}",
        "anchor": "cuBLAS",
        "us": us,
        "us_queued": us_queued,
        "tflops": flops / us / 1e6,
        "gbps": size / us / 1e3,
        "ok": True,
    }


def ceilings():
    a = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    # Without a graph, whose copies another engine of the card makes, at two thirds of the speed.
    b.copy_(a)
    copy = 2 * a.numel() * 2 / statistics.median(event_ms(lambda: b.copy_(a)) for _ in range(15)) / 1e6
    del a, b
    square = run("square", "square", 8192, 8192, 8192)
    return {"copy_gbps": copy, "matmul_tflops": square["tflops"], "device": torch.cuda.get_device_name()}, square


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--shapes", default=os.path.join(HERE, "..", "shapes.json"))
    args.add_argument("--model", default="")
    args.add_argument("--json")
    args = args.parse_args()
    with open(args.shapes) as f:
        models = json.load(f)["llama"]["models"]
    wanted = [name for name in args.model.split(",") if name]
    limits, square = ceilings()
    rows = [square]
    for model in models:
        if wanted and model["name"] not in wanted:
            continue
        for count in ROWS:
            for name, out, inner in products(model, count):
                rows.append(run(model["name"], name, count, out, inner))
                row = rows[-1]
                print(f"{row['head']} {row['case']}: {row['us']:.1f} us, {row['tflops']:.0f} TFLOP/s, {row['gbps']:.0f} GB/s", flush=True)
                torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"script": "peer_cublas", "ceilings": limits, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
