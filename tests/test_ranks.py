"""Several processes that jit one function: they compile the same programs."""

import io
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest

import hopflow as hf
from hopflow.errors import ArgumentTypeError, RanksError
from hopflow.graph.hashing import structural_hash

RANKS = 3


def step(x: Any, w: Any, n: int, scale: Any) -> Any:
    if x.shape[0] >= 4:
        x = x * 2
    y = x @ w + n
    return hf.sum(y) if scale.item() < 1.0 else hf.sum(y) * scale


ROUNDS = (  # batch sizes of the ranks, a number, and how many programs there are then
    ((2, 2, 2), 1, 0.5, 1),  # static
    ((3, 3, 3), 2, 0.5, 2),  # dynamic
    ((0, 3, 2), 3, 0.5, 2),
    ((5, 8, 4), 4, 0.5, 3),  # a guard fails on all
    ((9, 1, 7), 5, 0.5, 3),
    ((1, 7, 0), 6, 1.5, 5),  # another one: rank 0 compiles what rank 1 needs too
)


def programs(jitted: Any) -> list[tuple[str, list[str]]]:
    """All that was compiled, so that two processes can compare it."""
    return [
        (structural_hash(v.compiled.executable.graph), v.conditions())
        for family in jitted._families.values()
        for v in sorted(family.all(), key=lambda v: v.conditions())
    ]


def run_rank(rank: int, all_gather: Callable[[Any], Any]) -> list[Any]:
    jitted = hf.jit(step, ranks=all_gather)
    found = []
    for batches, n, scale, _ in ROUNDS:
        x, w = hf.ones((batches[rank], 4)), hf.ones((4, 2))
        args = x, w, n, hf.asarray(scale)
        assert jitted(*args).item() == step(*args).item()
        found.append(programs(jitted))
    return found


def _process(rank: int, given: Any, answers: Any) -> None:
    """A rank, whose all-gather goes through the process that started it."""

    def all_gather(record: Any) -> Any:
        answers.put((rank, "record", record))
        return given.get(timeout=60)

    answers.put((rank, "result", run_rank(rank, all_gather)))


def test_processes_compile_the_same_programs() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    inboxes = [context.Queue() for _ in range(RANKS)]
    processes = [
        context.Process(target=_process, args=(rank, inboxes[rank], answers))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    records: dict[int, Any] = {}
    exchanges = 0
    while len(results) < RANKS:
        rank, kind, value = answers.get(timeout=120)
        (results if kind == "result" else records)[rank] = value
        if len(records) == RANKS:
            exchanges += 1
            for inbox in inboxes:
                inbox.put([records[r] for r in range(RANKS)])
            records.clear()
    for process in processes:
        process.join(60)
    assert results[0] == results[1] == results[2]
    assert [len(found) for found in results[0]] == [count for *_, count in ROUNDS]
    assert exchanges == 4


class Together:
    """Threads in the place of processes."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.records: list[Any] = [None] * count

    def all_gather(self, rank: int) -> Callable[[Any], Any]:
        def exchange(record: Any) -> Any:
            self.records[rank] = record
            self.barrier.wait(10)
            found = list(self.records)
            self.barrier.wait(10)
            return found

        return exchange


def run_together(run: Callable[[int, Callable[[Any], Any]], Any]) -> list[Exception]:
    """The errors of two ranks, each of which runs `run(rank, all_gather)`."""
    together, errors = Together(2), dict[int, Exception]()

    def catch(rank: int) -> None:
        try:
            run(rank, together.all_gather(rank))
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=catch, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[rank] for rank in sorted(errors)]


def test_what_processes_cannot_agree_on_is_an_error_on_all() -> None:
    def run(rank: int, all_gather: Callable[[Any], Any]) -> None:
        hf.jit(lambda x: x + 1, ranks=all_gather)(hf.ones((2,) * (rank + 1)))

    errors = run_together(run)
    assert [type(error) for error in errors] == [RanksError, RanksError]
    assert "one kind, in one order" in str(errors[0])
    assert {"f32[_]" in str(e) and "f32[_, _]" in str(e) for e in errors} == {True}


def test_marks_are_the_same_on_all() -> None:
    programs: list[str] = []

    def run(rank: int, all_gather: Callable[[Any], Any], low: int) -> None:
        x = hf.ones(4 + rank)
        hf.mark_dynamic(x, 0, min=low)
        jitted = hf.jit(lambda x: x + 1, ranks=all_gather)
        jitted(x)
        programs.append(jitted.graph_text)

    assert not run_together(lambda rank, gather: run(rank, gather, 2))
    assert len({*programs}) == 1
    assert "x: f32[s0]" in programs[0]
    errors = run_together(lambda rank, gather: run(rank, gather, 1 + rank))
    assert [type(error) for error in errors] == [RanksError, RanksError]
    assert "hf.mark_dynamic(x, 0, min=2)" in str(errors[0])


def test_tensors_from_outside_are_of_one_type_on_all() -> None:
    def run(rank: int, all_gather: Callable[[Any], Any]) -> None:
        table = hf.ones(3 + rank)
        hf.jit(lambda x: x + hf.sum(table), ranks=all_gather)(hf.ones(2))

    errors = run_together(run)
    assert [type(error) for error in errors] == [RanksError, RanksError]
    assert "here     f32[3]\n  rank 1   f32[4]" in str(errors[0])


def test_all_hear_that_one_cannot_trace() -> None:
    def run(rank: int, all_gather: Callable[[Any], Any]) -> None:
        def f(x: Any) -> Any:
            if rank:
                raise KeyError("a user's error")
            return x

        hf.jit(f, ranks=all_gather)(hf.ones(2))

    errors = run_together(run)
    assert [type(error) for error in errors] == [RanksError, KeyError]
    assert "rank 1 could not trace `f`" in str(errors[0])
    assert "KeyError" in str(errors[0])
    assert "a user's error" in str(errors[0])


def test_the_preflight_trace_has_no_dynamic_dimension() -> None:
    kinds = io.StringIO()

    def f(x: Any) -> Any:
        print(type(x.shape[0]).__name__, file=kinds)
        return x

    jitted = hf.jit(f, ranks=lambda record: [record], dynamic=True)
    jitted(hf.ones(3))
    assert kinds.getvalue().split() == ["int", "SymInt"]


def test_what_a_function_changes_is_changed_once_in_each_process() -> None:
    def run(rank: int, all_gather: Any) -> None:
        log: list[int] = []

        def f(x: Any) -> Any:
            log.append(x.ndim)
            return x * len(log)

        jitted = hf.jit(f, ranks=all_gather)
        for k, sizes in enumerate(((3, 3), (3, 4), (5, 5), (4, 6)), 1):
            assert jitted(hf.ones(sizes[rank]))[0].item() == k == len(log)

    assert run_together(run) == []


def test_one_process_is_a_jit_like_any_other() -> None:
    records: list[Any] = []

    def alone(record: Any) -> Any:
        records.append(record)
        return [record]

    def f(x: Any, n: int) -> Any:
        return x * n

    jitted = hf.jit(ranks=alone)(f)
    found = [jitted(hf.ones(k), k).tolist() for k in (2, 3, 4)]
    assert found == [[2] * 2, [3] * 3, [4] * 4]
    assert [record["numbers"] for record in records] == [[2, 2], [3, 3]]
    assert records[0]["kind"] == "f: PyTreeSpec(((*, *), {})) of f32[_], int"


@pytest.mark.parametrize("records", [None, 3, [3], [{}]])
def test_the_exchange_is_checked(records: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="the records of all processes"):
        hf.jit(lambda x: x, ranks=lambda _: records)(hf.ones(2))
    with pytest.raises(ArgumentTypeError, match="`ranks` must be a function"):
        hf.jit(lambda x: x, ranks=3)  # type: ignore[arg-type]
