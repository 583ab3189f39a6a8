"""What many layers cost that are one `@hf.subgraph`, beside two of them.

    python -m benchmarks.layers [calls ...]

prints, for weights that are operands and weights that each layer closes over, the time
of the first call of `hf.jit` (trace and compile), forward and with the gradient, and
how many functions the program has.
"""

import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any

import numpy as np

import hopflow as hf
from hopflow.compiler.pipeline import clear_cache

WIDTH, HIDDEN, ROUNDS = 16, 64, 3


def block(x: Any, p: dict[str, Any]) -> Any:
    """A normalised two-layer perceptron, added to its input."""
    mean = hf.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    scale = hf.sqrt(hf.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    h = hf.tanh((centred / scale * p["gain"]) @ p["up"] + p["bias"])
    return x + h @ p["down"]


def weights(rng: np.random.Generator) -> dict[str, Any]:
    shapes = {
        "gain": (WIDTH,),
        "up": (WIDTH, HIDDEN),
        "bias": (HIDDEN,),
        "down": (HIDDEN, WIDTH),
    }
    return {
        name: hf.asarray(rng.normal(size=shape).astype(np.float32) / WIDTH)
        for name, shape in shapes.items()
    }


def as_operands(x: Any, layers: list[Any]) -> Any:
    shared = hf.subgraph(block)
    for p in layers:
        x = shared(x, p)
    return hf.sum(x * x)


def in_cells(x: Any, layers: list[Any]) -> Any:
    for p in layers:

        @hf.subgraph
        def layer(x: Any, *, p: Any = p) -> Any:
            return block(x, p)

        x = layer(x)
    return hf.sum(x * x)


def first_call(make: Callable[[], Any], args: Any) -> tuple[float, float, int]:
    """The least time of a first call, by the clock and by the processor, in seconds;
    and the functions of the program."""
    clock, processor, functions = [], [], 0
    for _ in range(ROUNDS):
        clear_cache()
        f, before = make(), hf.stats().functions
        times = perf_counter(), process_time()
        f(*args)
        clock.append(perf_counter() - times[0])
        processor.append(process_time() - times[1])
        functions = hf.stats().functions - before
    return min(clock), min(processor), functions


def main() -> None:
    counts = [int(text) for text in sys.argv[1:]] or [2, 200]
    for model in (as_operands, in_cells):
        for name, f in (("forward", model), ("gradient", hf.grad(model, (0, 1)))):
            least = 0.0
            for count in counts:
                rng = np.random.default_rng(0)
                x = hf.asarray(rng.normal(size=(8, WIDTH)).astype(np.float32))
                args = x, [weights(rng) for _ in range(count)]
                clock, spent, functions = first_call(partial(hf.jit, f), args)
                least = least or spent
                print(
                    f"{model.__name__:12} {name:9} {count:4} calls: "
                    f"{clock * 1e3:6.0f} ms, {spent * 1e3:6.0f} ms of the processor "
                    f"({spent / least:.1f} times), {functions} functions",
                    flush=True,
                )


if __name__ == "__main__":
    main()
