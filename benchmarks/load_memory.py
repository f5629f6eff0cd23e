"""Peak host memory while a model is loaded, against its bound: model size + largest tensor + 500 MB.

    python benchmarks/load_memory.py [--model MODEL] [--dtype bfloat16]

On CPU the loaded model itself is host memory, so the bound leaves room for one copy of one tensor and for the
interpreter with its libraries. Exits with 1 when the bound is passed.
"""

from __future__ import annotations

import argparse
import sys

from machine import describe_machine, peak_memory_bytes, versions

MB = 10**6
ALLOWANCE = 500 * MB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    import jax

    from jaxinfer.models.functional import FunctionalDecoder
    from jaxinfer.models.registry import describe_model
    from jaxinfer.parallel.mesh import make_mesh
    from jaxinfer.weights.loader import load_leaves
    from jaxinfer.weights.resolve import open_checkpoint, resolve_model

    jax.devices()  # the backend's own memory belongs to the libraries, not to the loading
    before = peak_memory_bytes()
    reader = open_checkpoint(resolve_model(args.model))
    model = describe_model(reader.config())
    decoder = FunctionalDecoder.create(model.spec, make_mesh(), args.dtype)
    plan = model.checkpoint_plan(decoder.dims)
    loaded = load_leaves(reader, plan, decoder.leaves, ignored=model.ignored_tensors)
    leaves = jax.block_until_ready(list(loaded.values()))
    peak = peak_memory_bytes()

    sizes = [leaf.nbytes for leaf in leaves]
    bound = sum(sizes) + max(sizes) + ALLOWANCE
    print(f"{describe_machine()}; {versions('jax', 'flax')}; {args.model}, {args.dtype}\n")
    print("| MB | |")
    print("|---|---|")
    for label, size in (
        ("libraries and backend, before loading", before),
        ("model", sum(sizes)),
        ("largest tensor", max(sizes)),
        ("bound: model + largest tensor + 500 MB", bound),
        ("peak", peak),
    ):
        print(f"| {label} | {size / MB:.0f} |")
    return 0 if peak <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
