"""Whether two implementations of the study came to the same end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hopflow.demo.kmeans import MAX_STEPS, Fit

RTOL = 1e-9

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was compared with one reference.

    reference   its name
    findings    by what was compared, what was found, and whether it is good enough
    """

    reference: str
    findings: dict[str, tuple[str, bool]]

    @property
    def ok(self) -> bool:
        return all(good for _, good in self.findings.values())


def compare(
    reference: str,
    ours: Fit,
    theirs: Fit,
    our_curves: Array | None = None,
    their_curves: Array | None = None,
) -> Agreement:
    """Compare fits of all runs (NumPy arrays), and their curves where both have them.

    Labels and steps must be equal; inertia, centroids and curves within `RTOL` of the
    greatest value.
    """
    findings = {
        "labels": _equal(ours.labels, theirs.labels),
        "steps": _equal(ours.steps, theirs.steps),
        "inertia": _close(ours.inertia, theirs.inertia),
        "centroids": _close(ours.centroids, theirs.centroids),
    }
    if our_curves is not None and their_curves is not None:
        findings["curves"] = _close(our_curves, their_curves)
    return Agreement(reference, findings)


def _equal(ours: Array, theirs: Array) -> tuple[str, bool]:
    if ours.shape != theirs.shape:
        return f"{ours.shape}, not {theirs.shape}", False
    different = int(np.sum(ours != theirs))
    if different:
        return f"{different:,} of {ours.size:,} differ", False
    return f"{ours.size:,} equal", True


def _close(ours: Array, theirs: Array) -> tuple[str, bool]:
    if ours.shape != theirs.shape:
        return f"{ours.shape}, not {theirs.shape}", False
    scale = float(np.max(np.abs(theirs)))
    difference = float(np.max(np.abs(ours - theirs))) / scale
    if difference == 0:
        return "the same bits", True
    # Written so that a NaN is not good enough.
    return f"within {difference:.0e}", difference <= RTOL


def sklearn_fits(points: Array, inits: Array) -> Fit:
    """What scikit-learn's KMeans makes of the same initial centroids.

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
    """Tensors of hopflow or JAX as NumPy arrays."""
    return [np.asarray(leaf) for leaf in tree]
