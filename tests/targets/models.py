"""Models whose work depends on their data, and calls of them."""

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import hopflow as hf

EXAMPLES: Final = Path(__file__).parent.parent.parent / "examples"


class Model(NamedTuple):
    """An exported model, and the arguments of calls."""

    program: Any
    calls: list[tuple[Any, ...]]


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


def classifier() -> Model:
    """A network that takes its own number of steps for each image of a digit."""
    found = example("adaptive_computation")
    layers = found["initial"](hf.random.key(0))
    _, (images, _) = found["data"]()

    def classify(images: Any) -> Any:
        thought = found["think_all"](layers, images)
        return hf.argmax(thought.answer, axis=1), thought.steps, thought.answer

    rows = hf.Dim("rows", min=1)
    program = hf.export(classify, (images[:3],), dynamic_shapes=[{0: rows}])
    return Model(program, [(images[:50],), (images[50:51],)])


LETTERS: Final = " abcdefghijklmnopqrstuvwxyz"
END: Final = 0
TEXT: Final = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty "
) * 2
HIDDEN: Final = 24


def logits(weights: Any, state: Any, letter: Any) -> tuple[Any, Any]:
    """The next state of a recurrent network, and what it says of the next letter."""
    state = hf.tanh(weights["embed"][letter] + state @ weights["recall"])
    return state, state @ weights["out"]


def surprise(weights: Any, text: Any) -> Any:
    """The mean negative logarithm of the likelihood of each letter after the first."""

    def step(state: Any, letters: Any) -> Any:
        letter, following = letters
        state, scores = logits(weights, state, letter)
        return state, hf.logsumexp(scores) - scores[following]

    _, bits = hf.scan(step, hf.zeros((HIDDEN,)), (text[:-1], text[1:]))
    return hf.mean(bits)


@cache
def trained() -> Any:
    """A network that has read `TEXT` some hundred times."""
    text = hf.asarray([LETTERS.index(c) for c in TEXT])
    keys = hf.random.split(hf.random.key(3), 3)
    n = len(LETTERS)
    shapes = {"embed": (n, HIDDEN), "recall": (HIDDEN, HIDDEN), "out": (HIDDEN, n)}
    weights = {
        name: hf.random.normal(key, shape) * 0.3
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def step(_: Any, weights: Any, sizes: Any) -> Any:
        """One step of RMSprop; `sizes` are the mean squares of the slopes."""
        slopes = hf.grad(surprise)(weights, text)
        sizes = {k: 0.95 * sizes[k] + 0.05 * slopes[k] ** 2 for k in weights}
        paces = {k: slopes[k] / (hf.sqrt(sizes[k]) + 1e-4) for k in weights}
        return {k: weights[k] - 0.01 * paces[k] for k in weights}, sizes

    sizes = {k: hf.zeros_like(w) for k, w in weights.items()}
    train = hf.jit(lambda w, sizes: hf.fori_loop(0, 300, step, (w, sizes))[0])
    return train(weights, sizes)


def beam_search(weights: Any, letter: Any) -> Any:
    """The likeliest words that begin with a letter, and how likely they are."""
    beams, longest = 4, 10

    def step(t: Any, texts: Any, scores: Any, states: Any, ended: Any) -> Any:
        states, found = logits(weights, states, texts[:, t])
        likely = found - hf.logsumexp(found, axis=1, keepdims=True)
        stay = hf.where(hf.equal(hf.arange(len(LETTERS)), END), 0.0, -hf.inf)
        totals = scores[:, None] + hf.where(ended[:, None], stay, likely)
        scores, at = hf.top_k(hf.reshape(totals, -1), beams)
        source, new = at // len(LETTERS), at % len(LETTERS)
        texts = texts[source].at[:, t + 1].set(new)
        return t + 1, texts, scores, states[source], ended[source] | (new == END)

    def goes_on(t: Any, *carry: Any) -> Any:
        return (t < longest) & ~hf.all(carry[-1])

    texts = hf.zeros((beams, longest + 1), dtype=hf.int64).at[:, 0].set(letter)
    scores = hf.where(hf.equal(hf.arange(beams), 0), 0.0, -hf.inf)
    start = (
        0,
        texts,
        scores,
        hf.zeros((beams, HIDDEN)),
        hf.zeros((beams,), dtype=hf.bool),
    )
    steps, texts, scores, *_ = hf.while_loop(goes_on, step, start)
    return texts, scores, steps


def speller() -> Model:
    """A small network that has learned the names of numbers, and spells by beams."""
    weights = trained()
    program = hf.export(lambda letter: beam_search(weights, letter), (3,))
    return Model(program, [(LETTERS.index(c),) for c in "otfse"])


def of_pendulum(transform: Callable[..., Any]) -> Model:
    found = example("pendulum")
    guess = hf.asarray(np.log(found["GUESS"]))
    angles = hf.asarray(found["measured_angles"]()[:8])
    program = hf.export(transform(found["misfit"]), (guess, angles))
    return Model(program, [(guess, angles), (guess * 1.1, angles)])


def solver() -> Model:
    """An adaptive solver of differential equations, compared with measurements."""
    return of_pendulum(lambda misfit: misfit)


def fit() -> Model:
    """The gradient through that solver, by which its parameters are fitted."""
    return of_pendulum(hf.value_and_grad)


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "classifier": classifier,
    "speller": speller,
    "solver": solver,
    "fit": fit,
}
