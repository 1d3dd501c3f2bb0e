"""Writes how far transformers' own bf16 is from its f32, which bounds how far ours may be.

Reads a GGUF file with Hugging Face transformers in bf16 on the CPU, runs the prompts of the f32 fixture that
`make_logits_fixtures.py` wrote, and compares the logits that are stored there: for each position the largest and the root mean
square error, both relative to the largest logit of that position in f32.

    python make_bf16_error_fixture.py MODEL.gguf F32_FIXTURE.json OUT.json

Needs torch, transformers, accelerate and gguf. Not run in CI: its output is committed.
"""

import argparse
import hashlib
import json
import pathlib

import torch
import transformers


def error(row: torch.Tensor, sample: dict) -> dict:
    """Of one position, over the logits that the f32 fixture has."""
    off = (row[sample["ids"]].double() - torch.tensor(sample["logits"], dtype=torch.float64)) / sample["largest"]
    return {
        "position": sample["position"],
        "max": float(f"{off.abs().max().item():.4g}"),
        "rms": float(f"{off.pow(2).mean().sqrt().item():.4g}"),
        "best_agrees": int(row.argmax()) == sample["best"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("f32", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    f32 = json.loads(args.f32.read_text())
    sha256 = hashlib.sha256(args.model.read_bytes()).hexdigest()
    assert sha256 == f32["model_sha256"], "the f32 fixture is of another model"
    source = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    assert all(weight.dtype == torch.bfloat16 for weight in model.state_dict().values())
    model.eval()

    prompts = []
    for prompt in f32["prompts"]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt["ids"]])).logits[0].float()
        errors = [error(logits[sample["position"]], sample) for sample in prompt["samples"]]
        worst = max(entry["max"] for entry in errors)
        rms = (sum(entry["rms"] ** 2 for entry in errors) / len(errors)) ** 0.5
        agree = sum(entry["best_agrees"] for entry in errors)
        print(f"{prompt['name']}: max {worst:.2e}, rms {rms:.2e}, best token of {agree} in {len(errors)} positions")
        prompts.append({"name": prompt["name"], "errors": errors})
    fixture = {
        "model_sha256": sha256,
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, bf16, CPU",
        "against": f32["reference"],
        "prompts": prompts,
    }
    text = json.dumps(fixture, separators=(",", ":"))
    args.out.write_text(text.replace('{"position"', '\n{"position"').replace('{"name"', '\n{"name"') + "\n")
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
