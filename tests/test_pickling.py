"""Jitted functions are copied, pickled and sent to other processes."""

import copy
import functools
import pickle  # noqa: TID251 - of what the test itself has made
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import PicklingError
from hopflow.testing.executions import agree
from hopflow.testing.requires import requires

hf: Any = hopflow

X = np.array([1.0, 2.0, 3.0], np.float32)


def grow(x: Any, factor: Any = 2.0) -> Any:
    return hf.scan(lambda c, y: (c + y * factor, c), 0.0, x)[1]


@hopflow.jit
def decorated(x: Any) -> Any:
    return grow(x)


@functools.partial(hopflow.jit, dynamic=True, donate=(0,))
def with_options(x: Any) -> Any:
    return x * 2 + 1


renamed: Any = hf.jit(grow)
of_a_gradient: Any = hf.jit(hf.grad(lambda x: hf.sum(grow(x) ** 2)))
of_a_partial: Any = hf.jit(functools.partial(grow, factor=3.0))
of_a_lambda: Any = hf.jit(lambda x: grow(x) + 1)
of_vmap: Any = hf.jit(hf.vmap(lambda x: hf.cond(x > 1, hf.sin, hf.cos, (x,))))
run_by_numpy: Any = hf.jit(grow, backend="interpreter")
with_a_backend: Any = hf.jit(grow, backend=lambda module, _: module)
of_dims: Any = hf.jit(grow, dynamic={"x": hf.Dim("n", min=1)})


def closure(weight: Any) -> Any:
    weight = hf.asarray(weight)

    @hopflow.jit
    def scaled(x: Any) -> Any:
        return grow(x) * weight

    return scaled


@hopflow.custom_jvp
def square(x: Any) -> Any:
    return x * x


square.defjvp(lambda primals, tangents: (primals[0] ** 2, 3 * tangents[0]))


def closure_of_rules() -> Any:
    @hopflow.custom_vjp
    def cube(x: Any) -> Any:
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, ct: (x * ct,))
    return hf.jit(hf.grad(lambda x: hf.sum(cube(x) + square(x))))


@hopflow.subgraph
def as_subgraph(x: Any) -> Any:
    return grow(x) * 2


@hopflow.control_flow
def as_control_flow(x: Any) -> Any:
    if hf.sum(x) > 0:
        return grow(x)
    return -x


@hopflow.checkpoint
def as_checkpoint(x: Any) -> Any:
    return grow(x) - 1


@hopflow.vmap
def as_vmap(x: Any) -> Any:
    return x * 2 + 1


@hopflow.custom_vjp
def cubed(x: Any) -> Any:
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, ct: (x * ct,))
NAMED: list[Any] = [as_subgraph, as_control_flow, as_checkpoint, as_vmap, cubed]
NAMED += [square, decorated, grow]


def total(x: Any) -> Any:
    return hf.sum(as_subgraph(cubed(x)))


@hopflow.jit
def jitted_total(x: Any) -> Any:
    return total(x)


def apart(x: Any) -> Any:
    return x, x * 2


class Model:
    def __init__(self, weight: Any) -> None:
        self.weight = hf.asarray(weight)
        self.own = hf.jit(self.apply)

    def apply(self, x: Any) -> Any:
        return grow(x) * self.weight

    @hopflow.jit
    def step(self: Any, x: Any) -> Any:
        return grow(x)


class Callable:
    def __call__(self, x: Any) -> Any:
        return grow(x) - 1


OF_NAMED: dict[str, Any] = {
    "grad": hf.grad(total, argnums=(0,)),
    "value_and_grad": hf.value_and_grad(total),
    "grad of jit": hf.grad(jitted_total),
    "jacfwd": hf.jacfwd(square),
    "jacrev": hf.jacrev(as_checkpoint),
    "hessian": hf.hessian(total),
    "functionalize": hf.functionalize(decorated),
    "checkpoint": hf.checkpoint(as_subgraph, policy="dots"),
    "vmap": hf.vmap(apart, in_dims=0, out_dims=(0, 0)),
    "vmap of vmap": hf.vmap(hf.vmap(grow)),
    "jit of vmap": hf.jit(hf.vmap(square)),
    "subgraph of grad": hf.subgraph(hf.grad(total)),
}
FUNCTIONS: dict[str, Any] = {
    "decorated": decorated,
    "with options": with_options,
    "renamed": renamed,
    "callable object": hf.jit(Callable()),
    "method": Model(2.0).own,
    "jitted method": hf.jit(Model(2.0).apply),
}
BY_VALUE: dict[str, Any] = {
    "gradient": of_a_gradient,
    "partial": of_a_partial,
    "lambda": of_a_lambda,
    "vmap": of_vmap,
    "backend by name": run_by_numpy,
    "backend": with_a_backend,
    "dims": of_dims,
    "closure": closure(3.0),
    "closure of rules": closure_of_rules(),
    "jit of jit": hf.jit(lambda x: decorated(x) + of_a_lambda(x)),
    "partial of a lambda": hf.jit(functools.partial(lambda a, x: grow(x, a), 2.0)),
}
ALL = FUNCTIONS | BY_VALUE

each = pytest.mark.parametrize("name", ALL)
needs_cloudpickle = requires("cloudpickle")


def round_trip(f: Any) -> Any:
    return pickle.loads(pickle.dumps(f))


@needs_cloudpickle
@each
def test_what_is_unpickled_computes_the_same(name: str) -> None:
    f = ALL[name]
    expected = f(hf.asarray(X))
    found = round_trip(f)
    agree(found(hf.asarray(X)), expected)
    agree(round_trip(found)(hf.asarray(X)), expected)


@requires("cloudpickle")
@each
def test_cloudpickle_takes_them_too(name: str) -> None:
    import cloudpickle

    f = ALL[name]
    expected = f(hf.asarray(X))
    agree(cloudpickle.loads(cloudpickle.dumps(f))(hf.asarray(X)), expected)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_one_with_a_name_is_itself(protocol: int) -> None:
    for f in (decorated, with_options, Model.step):
        assert pickle.loads(pickle.dumps(f, protocol)) is f


def test_a_function_with_rules_is_itself_by_its_name() -> None:
    assert round_trip(square) is square
    assert copy.deepcopy(square) is square


def test_a_function_with_a_name_is_sent_by_it() -> None:
    found = round_trip(renamed)
    assert found is not renamed
    assert found.__wrapped__ is grow


@pytest.mark.parametrize("f", NAMED, ids=lambda f: f.__name__)
def test_what_replaces_a_function_of_a_module_is_sent_by_its_name(f: Any) -> None:
    assert round_trip(f) is f
    assert copy.copy(f) is copy.deepcopy(f) is f


@pytest.mark.parametrize("name", OF_NAMED)
def test_transforms_of_what_has_a_name_need_no_cloudpickle(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    f = OF_NAMED[name]
    x = hf.ones((2, 2, 3)) if name == "vmap of vmap" else hf.asarray(X)
    found = round_trip(f)
    assert found is not f
    assert found.__qualname__ == f.__qualname__
    agree(found(x), f(x))
    agree(hf.jit(found)(x), f(x))
    assert copy.deepcopy(f) is f


class Ruled:
    def __init__(self, weight: float) -> None:
        self.weight = hf.asarray(weight)
        self.rows = hf.vmap(self.apply)
        self.body = hf.subgraph(self.apply)
        self.ruled = hf.custom_vjp(self.apply)
        self.ruled.defvjp(self.forward, self.backward)

    def apply(self, x: Any) -> Any:
        return x * self.weight

    def forward(self, x: Any) -> Any:
        return self.apply(x), None

    def backward(self, _: Any, ct: Any) -> Any:
        return (ct * self.weight * 10,)


@pytest.mark.parametrize("copied", [round_trip, copy.deepcopy])
def test_transforms_of_methods_go_with_their_object(copied: Any) -> None:
    first = Ruled(2.0)
    model = copied(first)
    model.weight[...] = 5.0
    x = hf.asarray(X)
    for name in ("rows", "body", "ruled"):
        agree(getattr(model, name)(x), 5 * X)
        agree(getattr(first, name)(x), 2 * X)
    agree(hf.grad(lambda x: hf.sum(model.ruled(x)))(x), np.full(3, 50.0, np.float32))


@needs_cloudpickle
def test_local_functions_with_rules_are_sent_by_value() -> None:
    def scale(x: Any) -> Any:
        return x * 2

    of_one = hf.custom_jvp(scale)
    of_one.defjvps(lambda t, result, x: t * 7)
    found = hf.grad(lambda x: hf.sum(round_trip(of_one)(x)))(hf.asarray(X))
    agree(found, np.full(3, 7.0, np.float32))
    body = round_trip(hf.subgraph(lambda x: scale(x) + 1))
    agree(body(hf.asarray(X)), 2 * X + 1)
    policy = round_trip(hf.checkpoint(scale, policy=lambda node: True))
    agree(policy(hf.asarray(X)), 2 * X)


@needs_cloudpickle
def test_options_are_kept() -> None:
    f = hf.jit(lambda x: x * 2, donate=(0,), dynamic=True)
    found = round_trip(f)
    before = hf.stats().traces
    for size in (2, 3, 4):
        x = hf.ones(size)
        found(x)
        with pytest.raises(hopflow.errors.InvalidTensorError):
            x.check_host()
    assert hf.stats().traces == before + 1


def test_what_was_compiled_is_not_sent() -> None:
    f = hf.jit(grow)
    empty = len(pickle.dumps(f))
    f(hf.asarray(X))
    assert len(pickle.dumps(f)) == empty
    with pytest.raises(
        hopflow.errors.ArgumentValueError, match="has not been compiled"
    ):
        _ = round_trip(f).graph


def test_a_method_is_sent_with_its_object() -> None:
    model = round_trip(Model(2.0))
    agree(model.own(X), Model(2.0).apply(X))
    model.weight = hf.asarray(5.0)
    agree(model.own(X), 5 * np.asarray(grow(X)))
    agree(round_trip(model.step)(X), grow(X))


@requires("cloudpickle")
def test_cloudpickle_keeps_what_a_closure_shares_with_its_object() -> None:
    import cloudpickle

    class Local:
        def __init__(self) -> None:
            self.weight = hf.asarray(2.0)
            self.step = hf.jit(lambda x: x * self.weight)

    model = cloudpickle.loads(cloudpickle.dumps(Local()))
    model.weight[...] = 7.0
    agree(model.step(X), 7 * X)


@needs_cloudpickle
def test_a_function_that_calls_itself_is_sent() -> None:
    def make() -> Any:
        @hopflow.jit
        def power(x: Any, n: Any) -> Any:
            return x * power(x, n - 1) if n else x

        return power

    agree(round_trip(make())(hf.asarray(X), 2), X**3)


# --- copies ---------------------------------------------------------------------------


@each
def test_copies_compute_the_same(name: str) -> None:
    f = ALL[name]
    for copied in (copy.copy(f), copy.deepcopy(f), copy.deepcopy([f])[0]):
        agree(copied(hf.asarray(X)), f(hf.asarray(X)))


def test_a_function_is_its_own_copy_as_in_python() -> None:
    assert copy.copy(of_a_lambda) is of_a_lambda
    assert copy.deepcopy({"f": of_a_lambda})["f"] is of_a_lambda


def test_a_copied_object_has_a_method_of_its_own() -> None:
    model = Model(2.0)
    copied = copy.deepcopy(model)
    copied.weight[...] = 5.0
    agree(copied.own(X), 5 * np.asarray(grow(X)))
    agree(model.own(X), 2 * np.asarray(grow(X)))


# --- what cannot be sent --------------------------------------------------------------


def test_without_cloudpickle_only_names_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert round_trip(decorated) is decorated
    agree(round_trip(renamed)(X), grow(X))
    with pytest.raises(
        PicklingError, match=r"for which cloudpickle is missing. Install"
    ):
        pickle.dumps(of_a_lambda)


@needs_cloudpickle
def test_what_a_closure_holds_must_be_picklable() -> None:
    stream = (i for i in range(3))
    f = hf.jit(lambda x: x + next(stream))
    with pytest.raises(PicklingError, match=r"cannot be pickled by value: .*generator"):
        pickle.dumps(f)


# --- other processes ------------------------------------------------------------------


def apply(f: Any, x: Any) -> Any:
    """What a worker does; NumPy's arrays come back."""
    return np.asarray(f(hf.asarray(x)))


def script(tmp_path: Path, body: str) -> str:
    """The output of a program of its own: without JAX, whose threads refuse forks."""
    file = tmp_path / "program.py"
    head = (
        "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
        "import numpy as np\nimport hopflow as hf\n"
    )
    file.write_text(head + textwrap.dedent(body))
    run = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


SENT = ["decorated", "renamed", "lambda", "closure", "gradient", "method"]


@needs_cloudpickle
def test_spawned_workers_get_them() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = {name: pool.submit(apply, ALL[name], X) for name in SENT}
        for name, result in found.items():
            agree(result.result(), ALL[name](hf.asarray(X)))


@needs_cloudpickle
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_main_module_sends_what_it_defines(method: str, tmp_path: Path) -> None:
    text = f"""
        from multiprocessing import get_context

        @hf.jit
        def named(x):
            return hf.scan(lambda c, y: (c + y, c), 0.0, x)[0]

        other = hf.jit(lambda x: named(x) * 2)

        def apply(f, x):
            return np.asarray(f(hf.asarray(x))).item()

        if __name__ == "__main__":
            x = np.arange(4.0)
            named(hf.asarray(x)), other(hf.asarray(x))  # compiled before, too
            with get_context({method!r}).Pool(2) as pool:
                print(pool.starmap(apply, [(f, x) for f in (named, other) * 2]))
                print(pool.map(other, [hf.asarray(x)])[0].item())
    """
    assert script(tmp_path, text) == "[6.0, 12.0, 6.0, 12.0]\n12.0"


def test_a_forked_process_runs_what_threads_ran_before(tmp_path: Path) -> None:
    text = """
        from multiprocessing import get_context

        f = hf.jit(hf.vmap(lambda k: hf.fori_loop(0, k, lambda i, a: a * 0.5 + i, 0.0)))
        hf.config.num_threads = 2
        k = hf.full(5000, 200)
        f(k)

        def again(n):
            return np.asarray(f(k))[0].item() == np.asarray(f(k))[-1].item()

        if __name__ == "__main__":
            with get_context("fork").Pool(2) as pool:
                print(pool.map_async(again, range(4)).get(60))
    """
    assert script(tmp_path, text) == "[True, True, True, True]"


@requires("joblib", "cloudpickle")
def test_joblib_sends_them(tmp_path: Path) -> None:
    text = f"""
        from joblib import Parallel, delayed
        from tests.test_pickling import ALL, X

        if __name__ == "__main__":
            functions = [ALL[name] for name in {SENT}]
            functions.append(hf.jit(lambda x: functions[0](x) + 1))
            jobs = [delayed(f)(hf.asarray(X)) for f in functions]
            for f, found in zip(functions, Parallel(n_jobs=2)(jobs)):
                want = np.asarray(f(hf.asarray(X)))
                np.testing.assert_allclose(np.asarray(found), want)
            print("done")
    """
    root = Path(__file__).parent.parent
    head = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    assert script(tmp_path, head + textwrap.dedent(text)) == "done"


@requires("dask", "distributed", "cloudpickle")
def test_dask_sends_them() -> None:
    import distributed

    with distributed.Client(n_workers=1, processes=True, dashboard_address=None) as c:
        for name in SENT:
            found = c.submit(apply, ALL[name], X).result(60)
            agree(found, ALL[name](hf.asarray(X)))


@requires("ray", "cloudpickle")
def test_ray_sends_them() -> None:
    import ray

    ray.init(num_cpus=1, include_dashboard=False)
    try:
        remote = ray.remote(apply)
        for name in SENT:
            found = ray.get(remote.remote(ALL[name], X))
            agree(found, ALL[name](hf.asarray(X)))
    finally:
        ray.shutdown()
