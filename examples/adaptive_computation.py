"""A recurrent network that decides for each image how long to look at it.

Adaptive computation time (Graves 2016, arXiv:1603.08983): after each step a unit gives
the probability to halt there. Once these add up to nearly one, the `while_loop` ends,
and the answer is the mean of the answers so far, weighted by them. Each step has a
price, so that the network learns to take few where few will do.

It is written for one image. `vmap` makes it one for a batch, in which each image takes
its own number of steps, and the gradient goes back through as many. A whole epoch, a
`scan` of gradients and updates, is one compiled program.

After 30 epochs, in about 5 s on one core, it recognizes 97 % of the test images, in 3
steps or up to 20; below 95 % it has failed.
"""

import sys
from typing import Any, NamedTuple

from optree import tree_map
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hopflow as hf

PIXELS, HIDDEN, DIGITS = 64, 64, 10
NEARLY_ONE = 0.99
PRICE = 0.03  # of a step, in the loss
RATE = 0.001  # of learning
BATCH = 32
EPOCHS = 30


class Thought(NamedTuple):
    """The carry of the loop."""

    steps: Any  # made so far
    state: Any  # f32[HIDDEN]
    halted: Any  # the probability to have halted so far
    answer: Any  # f32[DIGITS]: the sum of the answers, by the probability to halt there
    price: Any  # the number of steps in a form that has a derivative


def layer(key, inputs, outputs):
    weights = hf.random.normal(key, (outputs, inputs)) / inputs**0.5
    return weights, hf.zeros((outputs,))


def initial(key):
    look, recall, halt, answer = hf.random.split(key, 4)
    return {
        "look": layer(look, PIXELS, HIDDEN),
        "recall": layer(recall, HIDDEN, HIDDEN),
        "halt": layer(halt, HIDDEN, 1),
        "answer": layer(answer, HIDDEN, DIGITS),
    }


def think(layers, image):
    """The last thought about one image, f32[PIXELS]."""

    def apply(name, x):
        weights, bias = layers[name]
        return weights @ x + bias

    def goes_on(thought):
        return thought.halted < 1

    def step(before):
        state = hf.tanh(apply("look", image) + apply("recall", before.state))
        halt = hf.sigmoid(apply("halt", state)[0])
        is_last = before.halted + halt > NEARLY_ONE
        share = hf.where(is_last, 1 - before.halted, halt)  # they add up to one
        return Thought(
            steps=before.steps + 1,
            state=state,
            halted=hf.where(is_last, 1.0, before.halted + halt),
            answer=before.answer + share * apply("answer", state),
            price=before.price + hf.where(is_last, 1 + share, 1.0),
        )

    start = Thought(0, hf.zeros((HIDDEN,)), 0.0, hf.zeros((DIGITS,)), 0.0)
    return hf.while_loop(goes_on, step, start)


think_all = hf.vmap(think, in_dims=(None, 0))


def loss(layers, images, digits):
    """Cross entropy, and the price of the steps; the mean of a batch."""
    thought = think_all(layers, images)
    right = hf.take_along_axis(thought.answer, digits[:, None], axis=1)[:, 0]
    entropy = hf.logsumexp(thought.answer, axis=1) - right
    return hf.mean(entropy + PRICE * thought.price)


def adam(layers, slopes, moments, t):
    """An update (Kingma and Ba 2015), and the moments that the next one needs."""
    first, second = moments
    first = tree_map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
    second = tree_map(lambda v, g: 0.999 * v + 0.001 * g**2, second, slopes)
    rate = RATE * hf.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    layers = tree_map(
        lambda p, m, v: p - rate * m / (hf.sqrt(v) + 1e-8), layers, first, second
    )
    return layers, (first, second)


@hf.jit
def epoch(training, images, digits, key):
    """The state of the training after each image was seen once, in random order."""

    def update(training, batch):
        layers, moments, t = training
        slopes = hf.grad(loss)(layers, images[batch], digits[batch])
        return (*adam(layers, slopes, moments, t), t + 1), None

    batches = len(images) // BATCH
    order = hf.random.permutation(key, len(images))[: batches * BATCH]
    return hf.scan(update, training, order.reshape(batches, BATCH))[0]


@hf.jit
def test(layers, images, digits):
    """Which images are recognized, and how many steps each took."""
    thought = think_all(layers, images)
    return hf.argmax(thought.answer, axis=1) == digits, thought.steps


def data():
    """Images and digits to learn from, and others to test with."""
    digits = load_digits()
    parts = train_test_split(
        digits.data / 16, digits.target, test_size=0.25, random_state=0
    )
    images, test_images, digits, test_digits = map(hf.asarray, parts)
    images, test_images = (hf.astype(x, hf.float32) for x in (images, test_images))
    return (images, digits), (test_images, test_digits)


def train(report):
    """Train a network, and return its layers.

    `report` is called with the number of each epoch, and the layers after it.
    """
    learned, _ = data()
    first, *keys = hf.random.split(hf.random.key(0), 1 + EPOCHS)
    layers = initial(first)
    zeros = tree_map(hf.zeros_like, layers)
    training = layers, (zeros, zeros), hf.asarray(1)
    for i, key in enumerate(keys, 1):
        training = epoch(training, *learned, key)
        report(i, training[0])
    return training[0]


def main():
    _, unseen = data()

    def report(i, layers):
        if i % 5 == 0:
            right, steps = test(layers, *unseen)
            accuracy = hf.mean(hf.astype(right, hf.float32)).item()
            mean = hf.mean(hf.astype(steps, hf.float32)).item()
            print(f"epoch {i:2}: {accuracy:5.1%} in {mean:4.1f} steps")

    right, steps = test(train(report), *unseen)
    for n in range(1, int(hf.max(steps)) + 1):
        if images := int(hf.sum(steps == n)):
            print(f"{n:2} steps for {images:3} images")
    accuracy = hf.mean(hf.astype(right, hf.float32)).item()
    print(f"recognized: {accuracy:.1%}")
    if accuracy < 0.95:
        sys.exit("The network recognizes less than 95 % of the test images.")


if __name__ == "__main__":
    main()
