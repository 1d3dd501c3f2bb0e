#!/usr/bin/env python3
"""Joins results of the benches with those of peers: a Markdown table and a plot for each group of cases.

    python3 benches/report.py FILE.json.. [--out DIR] [--title TEXT]

Each file is one of, in any order, told apart by what is in it:
  - a report of the benches `attention`, `cache`, `layer` and `llama` (`--json`): has a header
  - results of a peers' script: has rows of `anchor`, and the name of the script
  - ceilings that the peers measured: has `copy_gbps`
Where the ops of a model's prompt were all timed, a table adds them up beside the step.
Writes DIR/report.md and DIR/GROUP.svg; needs nothing but Python.

A ratio is only formed between rows of one case, dtype and block size on one device: the peers' device must be named in
the description of ours. That both were measured in one run is for the caller to see to.
"""
import argparse
import json
import os
import sys
from html import escape

PEER_DTYPE = "bf16"
FLOPS_KINDS = ("prefill", "prefix", "mixed", "linear_many_rows")
OURS_COLOURS = ("#c0392b", "#e67e22", "#f1c40f", "#8e44ad", "#d35400", "#7f8c8d")
PEER_COLOURS = ("#1f4e79", "#2e75b6", "#5b9bd5", "#9dc3e6", "#1e6b52", "#2f9e77", "#7bc8a4", "#5d6d7e", "#85929e", "#aeb6bf")


class Row:
    """One time: of ours or of a peer's."""

    def __init__(self, group, case, who, ours, raw, device="", description=""):
        self.group, self.case, self.who, self.ours = group, case, who, ours
        self.device, self.description = device, description
        # Steps of whole models are in milliseconds.
        self.us = raw["ms"] * 1e3 if "ms" in raw else raw.get("us")
        self.tflops, self.gbps, self.tokens_per_s = raw.get("tflops"), raw.get("gbps"), raw.get("tokens_per_s")
        self.ok = raw.get("ok", True)
        self.error = raw.get("error")
        self.page, self.dtype = raw.get("page"), raw.get("dtype", PEER_DTYPE)
        self.eight_bits = "fp8" in (raw.get("layout") or "")
        self.path, self.fraction = raw.get("path") or raw.get("by", ""), raw.get("fraction")
        self.host_bound = raw.get("host_bound", False)

    @property
    def value(self):
        return {"TFLOP/s": self.tflops, "GB/s": self.gbps, "tokens/s": self.tokens_per_s}[unit(self.group)]


def unit(group):
    if group.startswith("model "):
        return "tokens/s"
    return "TFLOP/s" if group in FLOPS_KINDS else "GB/s"


def group_of(raw):
    if "model" in raw:
        # A peer's whole program decodes the same batches as its bare model does.
        return f"model {'decode' if raw['kind'] == 'hf-generate' else raw['kind']}"
    return f"layer {raw['op']}" if raw["kind"] == "layer" else raw["kind"]


def case_of(raw):
    """Peers name cases of the cache by their tokens, and those of models by batch and length."""
    if "model" in raw:
        size = f"{raw['batch']}x{raw['tokens']}" if "tokens" in raw else f"b{raw['batch']}c{raw['context']}"
        return f"{raw['model']} {size}"
    case = raw.get("case") or f"T={raw.get('tokens')}"
    return f"{raw.get('head', '')} {case}".strip()


class Results:
    def __init__(self):
        self.rows, self.headers, self.ceilings, self.missing = [], [], None, []
        # Rows of ours as they were read.
        self.raw = []

    def read(self, path):
        with open(path) as f:
            data = json.load(f)
        if "header" in data:
            self.take_ours(data)
        elif "script" in data:
            self.take_peers(data)
        elif "copy_gbps" in data:
            self.ceilings = data
        else:
            raise ValueError(f"{path}: neither a report, nor a peers' result, nor ceilings")

    def take_ours(self, data):
        header = data["header"]
        self.headers.append(header)
        devices = {d["name"]: d.get("description", "") for d in header.get("devices", [])}
        self.raw += data["rows"]
        for raw in data["rows"]:
            who = " ".join(x for x in (raw["device"], raw.get("layout") or raw.get("by"), "" if raw["dtype"] == PEER_DTYPE else raw["dtype"]) if x)
            self.take(Row(group_of(raw), case_of(raw), who, True, raw, raw["device"], devices.get(raw["device"], "")))

    def take_peers(self, data):
        self.ceilings = self.ceilings or data.get("ceilings")
        for raw in data["rows"]:
            if raw["anchor"] == "check":  # A peer's look at its own results.
                continue
            # A row without a kind says that a peer could not be loaded at all, one of "all" that a case was left out.
            if "kind" in raw and raw["anchor"] != "all":
                self.take(Row(group_of(raw), case_of(raw), raw["anchor"], False, raw))
            else:
                self.missing.append(f"{raw['anchor']}: {raw.get('error', 'no time')}")

    def take(self, row):
        if row.us is None:
            self.missing.append(f"{row.who}, {row.group} {row.case}: {row.error or 'no time'}")
        else:
            self.rows.append(row)

    def groups(self):
        return list(dict.fromkeys(r.group for r in self.rows))

    def comparable(self, ours, peer):
        """Why a row of ours cannot be compared with a peer's, or None if it can."""
        device = (self.ceilings or {}).get("device", "")
        if not device or device.lower() not in ours.description.lower():
            return f"peers ran on {device or 'an unknown device'}, ours on {ours.description or ours.device}"
        if ours.dtype != PEER_DTYPE:
            return f"peers ran in {PEER_DTYPE}, ours in {ours.dtype}"
        if ours.eight_bits and not peer.eight_bits:
            return "peers ran over a cache of 16 bits, ours of eight"
        if ours.page is not None and peer.page is not None and ours.page != peer.page:
            return f"peers ran with blocks of {peer.page}, ours of {ours.page}"
        return None

    def fraction(self, row):
        """Part of the ceiling: measured in our run, else by the peers on the same device."""
        if row.fraction is not None or self.ceilings is None or self.comparable(row, row) or unit(row.group) == "tokens/s":
            return row.fraction
        top = self.ceilings["matmul_tflops" if unit(row.group) == "TFLOP/s" else "copy_gbps"]
        return row.value / top if top else None


class Group:
    """The rows of one group, as a grid of cases and of those who ran them."""

    def __init__(self, results, name):
        self.results, self.name = results, name
        rows = [r for r in results.rows if r.group == name]
        self.cases = list(dict.fromkeys(r.case for r in sorted(rows, key=lambda r: not r.ours)))
        self.ours = list(dict.fromkeys(r.who for r in rows if r.ours))
        # `copy` moves the same bytes without an index: a bound of the case, not a peer.
        self.peers = list(dict.fromkeys(r.who for r in rows if not r.ours))
        self.grid = {(r.case, r.who, r.ours): r for r in rows}

    def get(self, case, who, ours):
        return self.grid.get((case, who, ours))

    def best(self, case, ours):
        """The fastest of ours, or of the peers, that was right."""
        who = self.ours if ours else [p for p in self.peers if p != "copy"]
        rows = [r for r in (self.get(case, w, ours) for w in who) if r and r.ok]
        return min(rows, key=lambda r: r.us, default=None)

    def ratio(self, case):
        """Time of the best peer over that of ours, for the fastest of ours that may be compared; and why not, if none may."""
        peer = self.best(case, False)
        ours = [r for r in (self.get(case, w, True) for w in self.ours) if r and r.ok]
        if peer is None or not ours:
            return None, None
        fit = [r for r in ours if self.results.comparable(r, peer) is None]
        if not fit:
            return None, self.results.comparable(ours[0], peer)
        return peer.us / min(r.us for r in fit), None


def number(value):
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def cell(row):
    if row is None:
        return "-"
    return number(row.value) + ("" if row.ok else "!") + ("h" if row.host_bound else "")


def markdown(results, title):
    out = [f"# {title}", ""]
    for h in results.headers:
        commit = f", commit {h['commit']}" if h.get("commit") else ""
        out.append(f"- `{h.get('command', h.get('bench', '?'))}`: {h.get('date', 'no date')}{commit}")
        for d in h.get("devices", []):
            copy, product = d.get("copy_gbps"), d.get("matmul_tflops")
            said = f"copy {number(copy)} GB/s" if copy else "copy not measured"
            said += f", product {number(product)} TFLOP/s" if product else ""
            out.append(f"  - {d['name']}: {d.get('description', '')}; {said}; times by {'the device' if d.get('timing') == 'device' else 'the wall clock'}")
    if results.ceilings:
        c = results.ceilings
        out.append(f"- peers: {c.get('device', '?')}, copy {number(c.get('copy_gbps'))} GB/s, product {number(c.get('matmul_tflops'))} TFLOP/s")
    out += ["", "Columns hold rates; `!`: the result was wrong; `h`: as fast as the host queues. `ratio` is the time of the best peer over ours: above 1, ours is faster.", ""]
    for name in results.groups():
        out += table(results, Group(results, name)) + [""]
    for step in steps(results):
        out += step.table(results) + [""]
    if results.missing:
        counts = {}
        for m in results.missing:
            counts[m] = counts.get(m, 0) + 1
        out += ["## Not measured", ""] + [f"- {m}" + (f" ({n} times)" if n > 1 else "") for m, n in counts.items()] + [""]
    return "\n".join(out)


def table(results, g):
    header = ["case"] + [f"**{w}**" for w in g.ours] + g.peers
    header += (["ours us", "path", "of ceiling"] if g.ours else []) + (["best peer", "its us", "ratio"] if g.peers else [])
    lines = [f"## {g.name}: {unit(g.name)}", "", f"![{g.name}]({file_name(g.name)})", ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    reasons = []
    for case in g.cases:
        cells = [case] + [cell(g.get(case, w, True)) for w in g.ours] + [cell(g.get(case, w, False)) for w in g.peers]
        if g.ours:
            best = g.best(case, True)
            share = results.fraction(best) if best else None
            cells += [number(best.us), best.path or "-", f"{100 * share:.0f}%" if share is not None else "-"] if best else ["-"] * 3
        if g.peers:
            peer = g.best(case, False)
            ratio, why = g.ratio(case)
            cells += [peer.who, number(peer.us)] if peer else ["-", "-"]
            cells.append(f"{ratio:.2f}" if ratio is not None else "-")
            if why and why not in reasons:
                reasons.append(why)
        lines.append("| " + " | ".join(cells) + " |")
    return lines + [""] * bool(reasons) + [f"No ratio: {why}." for why in reasons]


class Step:
    """A prompt's step of a model, and the ops that it launches."""

    def __init__(self, raw, layers):
        self.raw, self.layers = raw, layers
        rows = raw["batch"] * raw["tokens"]
        each = lambda op: (op, layers, dict(case=f"{op} rows={rows}"))
        layer = lambda op, count: (op, count, dict(op=op, case=f"rows={rows}"))
        # The first norm has nothing to add; the last one belongs to no layer.
        self.parts = [layer("rms_norm", 1), layer("add_rms_norm", 2 * layers), each("qkv"), layer("rotary_and_store", layers)]
        self.parts.append(("attention", layers, dict(kind="prefill", layout="paged", case=f"{raw['batch']}x{raw['tokens']}")))
        self.parts += [each("o"), each("gate_up+silu"), each("down"), ("lm_head", 1, dict(case=f"lm_head rows={raw['batch']}"))]

    def find(self, results, wanted):
        keys = dict(wanted, head=self.raw["model"], device=self.raw["device"], dtype=self.raw["dtype"])
        rows = [r for r in results.raw if r.get("us") and all(r.get(key) == value for key, value in keys.items())]
        return min(rows, key=lambda r: r["us"], default=None)

    def table(self, results):
        """Without a row for one of the ops, nothing."""
        top = results.ceilings or {}
        found = [(op, count, self.find(results, wanted)) for op, count, wanted in self.parts]
        if any(r is None for _, _, r in found) or not top.get("matmul_tflops"):
            return []
        lines, total, rest, floors = [], 0.0, 0.0, 0.0
        for op, count, r in found:
            floor = max(r["flops"] / top["matmul_tflops"] / 1e6, r["bytes"] / top["copy_gbps"] / 1e3)
            total += count * r["us"]
            if op != "attention":
                rest, floors = rest + count * r["us"], floors + count * floor
            lines.append(f"| {op} | {count} | {number(r['us'])} | {number(count * r['us'])} | {number(floor)} | {100 * floor / r['us']:.0f}% |")
        step = self.raw["ms"] * 1e3
        head = [f"## {case_of(self.raw)}, op by op: microseconds", "", "| op | times | us | all | floor | of floor |", "|" + "---|" * 6]
        lines.append(f"| all but attention | | | {number(rest)} | {number(floors)} | {100 * floors / rest:.0f}% |")
        lines.append(f"| sum, beside the step's {number(step)} | | | {number(total)} | | |")
        return head + lines


def steps(results):
    """The prompts of ours, by the faster of engine and bare model."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes.json")) as f:
        layers = {m["name"]: m["layers"] for m in json.load(f)["llama"]["models"]}
    best = {}
    for raw in results.raw:
        if raw.get("model") in layers and raw["kind"] == "prefill" and raw.get("ms"):
            key = (case_of(raw), raw["device"], raw["dtype"])
            if key not in best or raw["ms"] < best[key]["ms"]:
                best[key] = raw
    return [Step(raw, layers[raw["model"]]) for raw in best.values()]


def file_name(group):
    return group.replace(" ", "-") + ".svg"


def svg(g):
    """Horizontal bars, one block for each case."""
    series = [(w, True) for w in g.ours] + [(w, False) for w in g.peers]
    colours = {}
    for i, key in enumerate(series):
        palette = OURS_COLOURS if key[1] else PEER_COLOURS
        colours[key] = palette[(i if key[1] else i - len(g.ours)) % len(palette)]
    left, width, bar, gap, top = 190, 620, 9, 10, 46
    largest = max((r.value or 0 for r in g.grid.values()), default=0) or 1
    per_line = 6
    y = top + 16 * ((len(series) - 1) // per_line)
    body = []
    for i, key in enumerate(series):
        x, ly = 12 + (i % per_line) * 140, 30 + 16 * (i // per_line)
        name = f"{key[0]}" if not key[1] else f"ours: {key[0]}"
        body.append(f'<rect x="{x}" y="{ly}" width="9" height="9" fill="{colours[key]}"/><text x="{x + 13}" y="{ly + 8}">{escape(name)}</text>')
    y += 14
    for case in g.cases:
        rows = [(key, g.get(case, *key)) for key in series]
        rows = [(key, r) for key, r in rows if r is not None and r.value is not None]
        body.append(f'<text x="{left - 8}" y="{y + bar * len(rows) / 2 + 4:.1f}" text-anchor="end">{escape(case)}</text>')
        for key, r in rows:
            w = max(0.5, width * r.value / largest)
            body.append(f'<rect x="{left}" y="{y}" width="{w:.1f}" height="{bar - 1}" fill="{colours[key]}"><title>{escape(key[0])}: {number(r.value)}</title></rect>')
            body.append(f'<text x="{left + w + 4:.1f}" y="{y + 7.5:.1f}" font-size="8">{cell(r)}</text>')
            y += bar
        y += gap
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{y + 10}" font-family="sans-serif" font-size="10">'
    title = f'<rect width="100%" height="100%" fill="white"/><text x="12" y="18" font-size="13">{escape(g.name)}: {unit(g.name)}, longer is faster</text>'
    return "\n".join([head, title] + body + ["</svg>", ""])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("files", nargs="+")
    p.add_argument("--out", default=".")
    p.add_argument("--title", default="Kernels beside their peers")
    a = p.parse_args(argv)
    results = Results()
    for path in a.files:
        results.read(path)
    os.makedirs(a.out, exist_ok=True)
    with open(os.path.join(a.out, "report.md"), "w") as f:
        f.write(markdown(results, a.title))
    for name in results.groups():
        with open(os.path.join(a.out, file_name(name)), "w") as f:
            f.write(svg(Group(results, name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
