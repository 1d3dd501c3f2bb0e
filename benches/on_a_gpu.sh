#!/usr/bin/env bash
# What a GPU has to show, step by step, from binaries that were built elsewhere: see "On a GPU machine without a toolchain" in README.md.
#
#   BIN=folder OUT=folder [COMMIT=hash] [PEERS=folder] [DEVICE=cuda] on_a_gpu.sh STEP...
#
#   table      every attention kernel against plain loops, dtype by dtype, shared by as many processes as there are cores   (BIN/kernels)
#   sanitizer  compute-sanitizer over a few cases of every kernel                                                          (BIN/kernels)
#   attention  the bench, and then the peers' attention_anchors.py where PEERS is given: one after the other, on a card as warm
#   fp8        the bench over a cache of 8 bits
#   ops        linear, layer and cache
#   models     the bench llama over MODELS (default: all of shapes.json), and PEERS' llama_anchor.py
#
# LIMIT (default 240) seconds end each program, and all of `table`. Logs and JSON lie in OUT; a line for each program says how it ended, and
# the script fails if one did.
set -u
bin=${BIN:?a folder of binaries} out=${OUT:?a folder for results}
device=${DEVICE:-cuda} limit=${LIMIT:-240} models=${MODELS:-all} failed=0
mkdir -p "$out"
bench() { # NAME BINARY ARGS...
    local name=$1 binary=$2
    shift 2
    timeout "$limit" "$bin/$binary" --device "$device" --commit "${COMMIT:-}" --json "$out/$name.json" "$@" >"$out/$name.txt" 2>&1
    local code=$?
    [ $code = 0 ] || failed=1
    echo "$name: exit $code, $(grep -c '^| ' "$out/$name.txt") lines of table, ${SECONDS} s since the start"
}
peer() { # NAME ARGS...
    [ -n "${PEERS:-}" ] || return 0
    local name=$1
    shift
    OUT=$out timeout "$limit" python3 "$PEERS/$name.py" --budget $((limit * 3 / 4)) "$@" >"$out/$name.txt" 2>&1
    local code=$?
    [ $code = 0 ] || failed=1
    echo "$name: exit $code, ${SECONDS} s since the start"
}
table() {
    local end=$((SECONDS + limit)) of share
    of=$(nproc)
    for share in $(seq 0 $((of - 1))); do
        for test in over_eight_bits_in_bf16 in_bf16 over_eight_bits_in_f16 in_f16; do
            local left=$((end - SECONDS))
            [ $left -gt 0 ] || break
            BURN_PAGED_CASES=$share/$of timeout $left "$bin/kernels" --exact --nocapture \
                "attention::kernels::every_kernel_agrees_with_plain_loops_$test" >"$out/table-$share-$test.txt" 2>&1
            echo "$test $share/$of: exit $? $(grep -h '^attention, every kernel' "$out/table-$share-$test.txt")"
        done &
    done
    wait
}
for step in "$@"; do
    case $step in
        table)
            table | sort | tee "$out/table.txt"
            # A share that time left no room for has no line.
            [ "$(grep -c 'exit 0 ' "$out/table.txt")" = $((4 * $(nproc))) ] || failed=1
            ;;
        sanitizer)
            for tool in memcheck racecheck; do
                timeout "$limit" compute-sanitizer --error-exitcode 1 --tool $tool "$bin/kernels" keys_without_a_block fixed_parts >"$out/$tool.txt" 2>&1
                code=$?
                [ $code = 0 ] || failed=1
                echo "$tool: exit $code, $(tail -n 1 "$out/$tool.txt")"
            done
            ;;
        attention)
            bench attention attention ${ATTENTION:-}
            peer attention_anchors
            ;;
        fp8) bench fp8 attention --kv fp8 ${ATTENTION:-} ;;
        ops) for op in linear layer cache; do bench $op $op ${OPS:-}; done ;;
        models)
            bench models llama --dtype bf16 --random "$models" ${LLAMA:-}
            peer llama_anchor --hf
            ;;
        *)
            echo "unknown step: $step" >&2
            exit 2
            ;;
    esac
done
exit $failed
