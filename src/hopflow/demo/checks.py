"""Comparison of two implementations of the study."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hopflow.demo.kmeans import MAX_STEPS, Fit

RTOL = 1e-9

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The comparison with a reference.

    reference   its name
    findings    compared quantity -> (description of the difference, whether it is
                tolerable)
    """

    reference: str
    findings: dict[str, tuple[str, bool]]

    @property
    def ok(self) -> bool:
        return all(good for _, good in self.findings.values())


def compare(
    reference: str,
    fits: Fit,
    expected: Fit,
    curves: Array | None = None,
    expected_curves: Array | None = None,
) -> Agreement:
    """Compare the fits of all runs (NumPy arrays), and the curves if there are any.

    Labels and steps must be equal; inertia, centroids and curves within `RTOL` of the
    largest value.
    """
    findings = {
        "labels": _equal(fits.labels, expected.labels),
        "steps": _equal(fits.steps, expected.steps),
        "inertia": _close(fits.inertia, expected.inertia),
        "centroids": _close(fits.centroids, expected.centroids),
    }
    if curves is not None and expected_curves is not None:
        findings["curves"] = _close(curves, expected_curves)
    return Agreement(reference, findings)


def _equal(actual: Array, expected: Array) -> tuple[str, bool]:
    if actual.shape != expected.shape:
        return f"{actual.shape}, not {expected.shape}", False
    different = int(np.sum(actual != expected))
    if different:
        return f"{different:,} of {actual.size:,} differ", False
    return f"{actual.size:,} equal", True


def _close(actual: Array, expected: Array) -> tuple[str, bool]:
    if actual.shape != expected.shape:
        return f"{actual.shape}, not {expected.shape}", False
    scale = float(np.max(np.abs(expected)))
    difference = float(np.max(np.abs(actual - expected))) / scale
    if difference == 0:
        return "the same bits", True
    # NaN compares as False.
    return f"within {difference:.0e}", difference <= RTOL


def sklearn_fits(points: Array, inits: Array) -> Fit:
    """Return the fits of scikit-learn's KMeans from the same initial centroids.

    Args:
        points: f64[n, d]
        inits: f64[r, k, d]
    """
    from sklearn.cluster import KMeans

    models = [
        KMeans(
            len(init),
            init=init,
            n_init=1,
            algorithm="lloyd",
            tol=0.0,  # until no point changes its cluster
            max_iter=MAX_STEPS,
        ).fit(points)
        for init in inits
    ]
    return Fit(
        np.stack([m.cluster_centers_ for m in models]),
        np.stack([m.labels_ for m in models]),
        np.asarray([m.inertia_ for m in models]),
        np.asarray([m.n_iter_ for m in models]),
    )


def as_arrays(tree: Sequence[Any]) -> list[Array]:
    """Return tensors of hopflow or JAX as NumPy arrays."""
    return [np.asarray(leaf) for leaf in tree]
