"""llama.cpp through llama-cpp-python's C API, many sequences in one batch as llama-server's slots do it.

`llama_cpp.Llama` itself runs one sequence at a time. A prefix common to all prompts is computed once and shared.
"""

from __future__ import annotations

import argparse
import itertools
import os

from worker import Engine, Prompts, serve

MAX_SEQUENCES = 64
BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
MIN_SHARED_PREFIX = 16
CONTEXT_PER_SEQUENCE = 576  # W2, the longest: 512 + 32 prompt tokens and 32 outputs


def common_prefix_length(prompts: Prompts) -> int:
    """Leading tokens that all share, short of a whole prompt: the last token's logits are needed of each."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def build(args: argparse.Namespace) -> Engine:
    import llama_cpp as llama
    import numpy as np

    if not args.gguf:
        raise SystemExit("llama.cpp reads GGUF files: pass --gguf to the benchmark")
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(args.gguf.encode(), llama.llama_model_default_params())
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    params = llama.llama_context_default_params()
    params.n_seq_max = MAX_SEQUENCES
    params.n_ctx = MAX_SEQUENCES * CONTEXT_PER_SEQUENCE
    params.n_batch, params.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
    params.n_threads = params.n_threads_batch = args.threads
    params.no_perf = True
    # One cache of its own per sequence: a unified one is scanned whole for every token.
    params.kv_unified = False
    context = llama.llama_init_from_model(model, params)
    memory = llama.llama_get_memory(context)
    batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(items: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, sequence, wants a token) rows; the greedy token of each sequence that wants one."""
        chosen: dict[int, int] = {}
        for start in range(0, len(items), BATCH_TOKENS):
            part = items[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for row, (token, position, sequence, wanted) in enumerate(part):
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            if status := llama.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for row, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    logits = llama.llama_get_logits_ith(context, row)
                    chosen[sequence] = int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())
        return chosen

    def generate(prompts: Prompts, max_tokens: int) -> Prompts:
        llama.llama_memory_clear(memory, False)
        shared = common_prefix_length(prompts) if len(prompts) > 1 else 0
        if shared >= MIN_SHARED_PREFIX:
            decode([(token, i, 0, False) for i, token in enumerate(prompts[0][:shared])])
            for sequence in range(1, len(prompts)):
                llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        else:
            shared = 0
        chosen = decode(
            [
                (token, i, sequence, i == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for i, token in enumerate(prompt[shared:], shared)
            ]
        )
        outputs = [[chosen[sequence]] for sequence in range(len(prompts))]
        for step in range(max_tokens - 1):
            chosen = decode(
                [(outputs[s][-1], len(prompt) + step, s, True) for s, prompt in enumerate(prompts)]
            )
            for sequence, output in enumerate(outputs):
                output.append(chosen[sequence])
        return outputs

    return Engine(
        version=llama.__version__,
        settings=f"{os.path.basename(args.gguf)}, f16 cache, {args.threads} threads",
        generate=generate,
    )


if __name__ == "__main__":
    serve(build)
