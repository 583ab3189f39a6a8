"""The demo: it agrees, says so, and says so only then."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import demo
from hopflow.demo import kmeans
from hopflow.demo.checks import as_arrays, compare, sklearn_fits
from hopflow.demo.kmeans import Fit
from hopflow.demo.report import duration
from hopflow.demo.timing import measure
from hopflow.testing.requires import requires

requires_all = requires("jax", "matplotlib", "rich", "sklearn")


def a_fit() -> Fit:
    return Fit(
        np.arange(12.0).reshape(1, 3, 4),
        np.asarray([[0, 1, 2, 1]]),
        np.asarray([7.0]),
        np.asarray([4]),
    )


def some_points(seed: int) -> Any:
    return hf.random.normal(hf.random.key(seed), (60, 2), hf.float64)


# --- the whole ------------------------------------------------------------------------


@requires_all
def test_the_demo_agrees_with_all_and_writes_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(tmp_path / "made", runs=2, steps=4)
    said = capsys.readouterr().out
    assert " = while_loop(" in said
    assert "JAX / hopflow" in said
    *_, last = said.rstrip().splitlines()
    assert last.startswith("Everything agreed: ")
    picture = (tmp_path / "made" / "kmeans.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


@requires_all
def test_the_demo_says_with_whom_it_does_not_agree(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def others(points: Any, inits: Any) -> Fit:
        known = sklearn_fits(points, inits)
        return known._replace(steps=known.steps + 1)

    monkeypatch.setattr(demo, "sklearn_fits", others)
    assert not demo.run(tmp_path, runs=1, steps=3)
    *_, last = capsys.readouterr().out.rstrip().splitlines()
    assert last == "hopflow does not agree with scikit-learn."


# --- the program ----------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_empty_clusters_get_the_points_that_are_farthest_away(plain: bool) -> None:
    points = hf.asarray([[0.0], [1.0], [2.0], [9.0], [7.0]], dtype=hf.float64)
    # All points are nearest to the first: two clusters are empty.
    init = hf.asarray([[1.0], [100.0], [200.0]], dtype=hf.float64)
    improve = hf.jit(kmeans.improve)
    if plain:
        with hf.debug():
            centroids, inertia = improve(points, init)
    else:
        centroids, inertia = improve(points, init)
    assert np.asarray(centroids).tolist() == [[1.0], [9.0], [7.0]]
    assert float(inertia) == 1 + 0 + 1 + 64 + 36


def test_a_fit_ends_where_another_step_changes_nothing() -> None:
    points = some_points(1)
    end = kmeans.fit(points, points[:4] + 0.01)
    centroids, inertia = kmeans.improve(points, end.centroids)
    np.testing.assert_array_equal(np.asarray(centroids), np.asarray(end.centroids))
    assert float(inertia) == pytest.approx(float(end.inertia))
    assert 1 < int(end.steps) < kmeans.MAX_STEPS


def test_the_history_of_a_run_never_rises() -> None:
    points = some_points(2)
    [curve] = as_arrays([kmeans.history(points, points[:4] + 0.01, 9)])
    assert curve.shape == (9,)
    assert np.all(np.diff(curve) <= 1e-12)


def test_the_last_initial_centroid_attracts_no_point() -> None:
    points = some_points(3)
    inits = kmeans.initial_centroids(points, 5, 3, 0)
    assert inits.shape == (3, 5, 2)
    for init, last_has_some in zip(inits, (True, True, False), strict=True):
        labels, _ = kmeans.assign(points, init)
        counts = np.bincount(np.asarray(labels), minlength=5)
        assert counts[:4].min() >= 1
        assert (counts[4] > 0) == last_has_some


# --- comparing and measuring ----------------------------------------------------------


def test_a_fit_agrees_with_itself() -> None:
    curves = np.ones((1, 5))
    found = compare("itself", a_fit(), a_fit(), curves, curves)
    assert found.ok
    assert found.findings == {
        "labels": ("4 equal", True),
        "steps": ("1 equal", True),
        "inertia": ("the same bits", True),
        "centroids": ("the same bits", True),
        "curves": ("the same bits", True),
    }


@pytest.mark.parametrize(
    ("what", "change", "found"),
    [
        ("labels", lambda x: x + (x == 2), "1 of 4 differ"),
        ("steps", lambda x: x + 1, "1 of 1 differ"),
        ("inertia", lambda x: x * (1 + 1e-6), "within 1e-06"),
        ("inertia", lambda x: x * np.nan, "within nan"),
        ("centroids", lambda x: x + 1e-6, "within 9e-08"),
        ("centroids", lambda x: x[:, :2], "(1, 2, 4), not (1, 3, 4)"),
        ("labels", lambda x: x[:, :2], "(1, 2), not (1, 4)"),
    ],
)
def test_what_differs_is_found(what: str, change: Any, found: str) -> None:
    fit = a_fit()
    changed = fit._replace(**{what: change(getattr(fit, what))})
    agreement = compare("another", changed, fit)
    assert not agreement.ok
    assert agreement.findings[what] == (found, False)


def test_rounding_is_no_difference() -> None:
    fit = a_fit()
    agreement = compare("another", fit._replace(inertia=fit.inertia * (1 + 1e-15)), fit)
    assert agreement.ok


def test_contenders_take_turns_after_their_first_calls() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    contenders = {"a": lambda: call("a"), "b": lambda: call("b")}
    times, results = measure(contenders, runs=3)
    assert calls == ["a", "b"] * 4
    assert results == {"a": 1, "b": 2}
    assert all(t.first_call > 0 and t.run > 0 for t in times.values())


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.2345, "1.23 s"), (0.0381, "38.1 ms"), (1e-5, "0.0 ms")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
