"""Tests of report.py on small files made by hand: python3 -m unittest discover -s benches"""
import json
import os
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

import report

CEILINGS = {"copy_gbps": 4000.0, "read_gbps": 4100.0, "matmul_tflops": 800.0, "device": "NVIDIA H200"}


def ours(rows, description="NVIDIA H200 (ptx_sm90)"):
    devices = [{"name": "cuda", "description": description, "copy_gbps": 4000.0, "matmul_tflops": None, "timing": "device"}]
    header = {"bench": "attention", "date": "2026-11-29", "commit": "abc", "command": "attention --device cuda", "devices": devices}
    return {"header": header, "notes": [], "rows": rows}


def our_row(**changes):
    row = dict(kind="decode", head="llama3-8b", case="b1c1024", op="attention", layout="paged", page=16, dtype="bf16", device="cuda")
    row.update(path="Portable", us=20.0, tflops=1.0, gbps=200.0, fraction=0.05, host_bound=False)
    return {**row, **changes}


def peers(script, rows):
    return {"script": script, "ceilings": CEILINGS, "seconds": 1.0, "rows": rows}


def peer_row(anchor, us, **changes):
    row = dict(kind="decode", head="llama3-8b", case="b1c1024", page=16, anchor=anchor, us=us, ok=True, tflops=1.0, gbps=4000.0 / us)
    return {**row, **changes}


def our_model_row(**changes):
    row = dict(kind="decode", model="llama3-8b", batch=8, context=1024, device="cuda", by="engine", weights="random", dtype="bf16", page=16)
    row.update(ms=5.0, tokens_per_s=1600.0, floor_ms=4.0, fraction=0.8)
    return {**row, **changes}


def peer_model_row(**changes):
    row = dict(kind="decode", model="llama3-8b", batch=8, context=1024, anchor="torch-llama", attention="fi_tc", ms=4.5, tokens_per_s=1777.0, floor_ms=4.0)
    return {**row, **changes}


class Report(unittest.TestCase):
    def run_on(self, *files):
        """The report and the names of all files that were written."""
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for i, data in enumerate(files):
                paths.append(os.path.join(folder, f"{i}.json"))
                with open(paths[-1], "w") as f:
                    json.dump(data, f)
            out = os.path.join(folder, "out")
            report.main([*paths, "--out", out])
            for name in os.listdir(out):
                if name.endswith(".svg"):
                    ElementTree.parse(os.path.join(out, name))
            with open(os.path.join(out, "report.md")) as f:
                return f.read(), sorted(os.listdir(out))

    def line(self, text, case):
        lines = [line for line in text.splitlines() if line.startswith(f"| {case} |")]
        self.assertEqual(len(lines), 1, text)
        return [cell.strip() for cell in lines[0].strip("|").split("|")]

    def test_a_cache_of_eight_bits_is_not_compared_with_one_of_sixteen(self):
        rows = [our_row(layout="paged fp8", us=5.0), our_row(us=20.0)]
        text, _ = self.run_on(ours(rows), peers("p", [peer_row("fa", 10.0)]))
        self.assertIn("cuda paged fp8", text)
        self.assertIn("| 0.50 |", text)

    def test_the_ratio_is_to_the_fastest_peer_that_was_right(self):
        rows = [peer_row("fa3", 12.0), peer_row("fi_decode", 10.0), peer_row("cheat", 1.0, ok=False)]
        text, files = self.run_on(ours([our_row()]), peers("attention_anchors", rows))
        line = self.line(text, "llama3-8b b1c1024")
        self.assertEqual(line, ["llama3-8b b1c1024", "200", "333", "400", "4000!", "20.0", "Portable", "5%", "fi_decode", "10.0", "0.50"])
        self.assertEqual(files, ["decode.svg", "report.md"])

    def test_the_fastest_of_ours_counts(self):
        rows = [our_row(), our_row(layout="packed", us=5.0, gbps=800.0, path="MmaDecode", fraction=0.2)]
        text, _ = self.run_on(ours(rows), peers("attention_anchors", [peer_row("fa3", 10.0)]))
        line = self.line(text, "llama3-8b b1c1024")
        self.assertEqual(line[-6:], ["5.0", "MmaDecode", "20%", "fa3", "10.0", "2.00"])

    def test_other_devices_dtypes_and_blocks_give_no_ratio(self):
        peer = peers("attention_anchors", [peer_row("fa3", 10.0)])
        for data, why in [
            (ours([our_row()], "a processor"), "peers ran on NVIDIA H200, ours on a processor"),
            (ours([our_row(dtype="f32")]), "peers ran in bf16, ours in f32"),
            (ours([our_row(page=32)]), "peers ran with blocks of 16, ours of 32"),
        ]:
            text, _ = self.run_on(data, peer)
            self.assertEqual(self.line(text, "llama3-8b b1c1024")[-1], "-")
            self.assertIn(f"No ratio: {why}.", text)

    def test_cases_of_the_cache_join_by_tokens_and_a_plain_copy_is_no_peer(self):
        mine = our_row(kind="store", case="T=32", tokens=32, op="store_kv", us=4.0)
        theirs = [dict(kind="store", head="llama3-8b", tokens=32, page=16, anchor=a, us=us, ok=True, gbps=1.0) for a, us in (("triton", 6.0), ("copy", 2.0))]
        text, _ = self.run_on(ours([mine]), peers("cache_anchors", theirs))
        self.assertEqual(self.line(text, "llama3-8b T=32")[-3:], ["triton", "6.0", "1.50"])

    def test_a_missing_ceiling_is_taken_from_the_peers_of_the_same_device(self):
        mine = our_row(kind="prefill", case="1x8192", tflops=200.0, fraction=None)
        text, _ = self.run_on(CEILINGS, ours([mine]))
        self.assertEqual(self.line(text, "llama3-8b 1x8192")[-1], "25%")
        text, _ = self.run_on(CEILINGS, ours([mine], "a processor"))
        self.assertEqual(self.line(text, "llama3-8b 1x8192")[-1], "-")

    def test_what_was_not_measured_is_said(self):
        failed = dict(kind="decode", head="llama3-8b", case="b1c1024", anchor="fa3", error="no wheel")
        skipped = dict(kind="decode", head="llama3-8b", case="b256c32768", anchor="all", error="skipped: 34 GB")
        broken = our_row(case="b8c1024", us=None, error="wrong: relative error 1")
        text, _ = self.run_on(ours([our_row(), broken]), peers("attention_anchors", [failed, failed, skipped, dict(anchor="triton", error="absent")]))
        for said in ["fa3, decode llama3-8b b1c1024: no wheel (2 times)", "skipped: 34 GB", "triton: absent", "wrong: relative error 1"]:
            self.assertIn(said, text)

    def test_each_op_of_a_layer_is_a_group(self):
        rows = [our_row(kind="layer", op=op, case="rows=32", layout="") for op in ("rms_norm", "silu_and_mul")]
        text, files = self.run_on(ours(rows))
        self.assertEqual(files, ["layer-rms_norm.svg", "layer-silu_and_mul.svg", "report.md"])
        self.assertIn("## layer rms_norm: GB/s", text)

    def test_steps_of_models_join_by_model_batch_and_length(self):
        prefill = dict(kind="prefill", tokens=1024)
        mine = [our_model_row(), our_model_row(by="model", ms=4.0, tokens_per_s=2000.0, fraction=1.0)]
        mine.append({**our_model_row(ms=100.0, tokens_per_s=81920.0, fraction=0.5), **prefill})
        del mine[2]["context"]
        theirs = [peer_model_row(), peer_model_row(anchor="transformers", kind="hf-generate", ms=40.0, tokens_per_s=200.0)]
        theirs.append({**peer_model_row(ms=90.0, tokens_per_s=91022.0), **prefill})
        del theirs[2]["context"]
        theirs.append(dict(anchor="check", model="llama3-8b", decode_vs_prefill=1e-2))
        text, files = self.run_on(ours(mine), peers("llama_anchor", theirs))
        line = self.line(text, "llama3-8b b8c1024")
        self.assertEqual(line, ["llama3-8b b8c1024", "1600", "2000", "1777", "200", "4000", "model", "100%", "torch-llama", "4500", "1.12"])
        self.assertEqual(self.line(text, "llama3-8b 8x1024")[-6:], ["100000", "engine", "50%", "torch-llama", "90000", "0.90"])
        self.assertIn("## model decode: tokens/s", text)
        self.assertNotIn("Not measured", text)
        self.assertEqual(files, ["model-decode.svg", "model-prefill.svg", "report.md"])

    def test_ops_of_a_prompt_are_added_up(self):
        step = dict(our_model_row(ms=60.0, tokens_per_s=1.0), kind="prefill", tokens=1024)
        del step["context"]
        rows = []
        # Each op takes 100 us, twice its floor: 200 MB at 4 TB/s, or 40 GFLOP at 800 TFLOP/s.
        for op in ("qkv", "o", "gate_up+silu", "down"):
            rows.append(our_row(kind="linear_many_rows", op=op, case=f"{op} rows=8192", layout="", us=100.0, flops=4e10, bytes=0.0))
        for op in ("rms_norm", "add_rms_norm", "rotary_and_store"):
            rows.append(our_row(kind="layer", op=op, case="rows=8192", layout="", us=100.0, flops=0.0, bytes=2e8))
        rows.append(our_row(kind="linear", op="lm_head", case="lm_head rows=8", layout="", us=100.0, flops=0.0, bytes=2e8))
        text, _ = self.run_on(CEILINGS, ours([step, *rows]))
        self.assertNotIn("op by op", text)
        rows.append(our_row(kind="prefill", case="8x1024", us=200.0, flops=4e10, bytes=0.0))
        text, _ = self.run_on(CEILINGS, ours([step, *rows]))
        self.assertIn("## llama3-8b 8x1024, op by op", text)
        self.assertEqual(self.line(text, "attention")[-5:], ["32", "200", "6400", "50.0", "25%"])
        self.assertEqual(self.line(text, "all but attention")[-3:], ["22600", "11300", "50%"])
        self.assertEqual(self.line(text, "sum, beside the step's 60000")[-3:], ["29000", "", ""])

    def test_a_file_of_another_kind_is_refused(self):
        with self.assertRaisesRegex(ValueError, "neither"):
            self.run_on({"rows": []})


if __name__ == "__main__":
    unittest.main()
