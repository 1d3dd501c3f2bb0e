"""Tokens per second of llama.cpp on the cases that the bench `llama` runs on a processor: same file, lengths, threads.

Needs llama-cpp-python. Usage: python peer_llama_cpp.py MODEL.gguf [--threads N] [--json OUT.json]

Uses the low-level interface, so that neither sampling nor text is in the time.
"""

import argparse
import json
import statistics
import time

import llama_cpp

# Sequences and tokens of each, for prefill and decode.
CASES = [(1, 128), (8, 128), (1, 1024)]


def decode(context, tokens, positions, sequences):
    """One call of llama_decode; logits for the last token of each sequence only."""
    count = len(tokens)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    last = {sequence: at for at, sequence in enumerate(sequences)}
    for at in range(count):
        batch.token[at] = tokens[at]
        batch.pos[at] = positions[at]
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = sequences[at]
        batch.logits[at] = last[sequences[at]] == at
    assert llama_cpp.llama_decode(context, batch) == 0
    llama_cpp.llama_synchronize(context)
    llama_cpp.llama_batch_free(batch)


def run(model, threads, batch, prompt, steps, vocab):
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = batch * (prompt + steps + 64)
    params.n_batch = batch * prompt
    params.n_ubatch = 512
    params.n_seq_max = batch
    params.n_threads = threads
    params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    tokens = [(at * 7919 + s * 104729 + 13) % vocab for s in range(batch) for at in range(prompt)]
    positions = [at for _ in range(batch) for at in range(prompt)]
    sequences = [s for s in range(batch) for _ in range(prompt)]
    begin = time.perf_counter()
    decode(context, tokens, positions, sequences)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for step in range(steps - 1):
        row = [(step * 31 + s) % vocab for s in range(batch)]
        decode(context, row, [prompt + step] * batch, list(range(batch)))
    rest = time.perf_counter() - begin
    llama_cpp.llama_free(context)
    return batch * prompt / first, batch * (steps - 1) / rest if steps > 1 else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--name", default="smollm2-135m", help="what results call the model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), params)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = []

    def add(kind, batch, prompt, steps, at, **length):
        runs = [run(model, args.threads, batch, prompt, steps, vocab)[at] for _ in range(args.runs + 1)]
        rate = statistics.median(runs[1:])
        tokens = batch * length.get("tokens", 1)
        row = dict(anchor="llama.cpp", kind=kind, model=args.name, batch=batch, **length, tokens_per_s=rate, ms=tokens / rate * 1e3)
        rows.append(row)
        print(f"{kind:8} {batch}x{list(length.values())[0]:<5} {rate:8.1f} tok/s", flush=True)

    for batch, tokens in CASES:
        add("prefill", batch, tokens, 1, 0, tokens=tokens)
    for batch, context in CASES:
        # The context of the middle step is the one that is named.
        add("decode", batch, context - args.decode // 2, args.decode + 1, 1, context=context)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"script": "llama_cpp", "rows": rows}, file, indent=1)


main()
