"""What a function reads from outside is found again at each call."""

import sys
import threading
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple, cast

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import hopflow
from hopflow.dtypes import DType
from hopflow.testing.executions import agree
from hopflow.trace.outside import watch

pytestmark = pytest.mark.slow

hf: Any = hopflow

X = hf.asarray(np.linspace(0.5, 1.5, 3, dtype=np.float32))

# --- places --------------------------------------------------------------------------

Read = Callable[[Any], Any]


class Place(NamedTuple):
    """A place: `bind` puts a value there, `read` is a function that reads it."""

    bind: Callable[[Any], None]
    read: Read


def use(x: Any, value: Any) -> Any:
    """What depends on a value of any kind."""
    if value is None:
        return x
    if isinstance(value, str):
        return getattr(hf, value)(x)
    if isinstance(value, bool):
        return x if value else -x
    if isinstance(value, dict):
        return use(use(x, value["first"]), value["rest"][0])
    if isinstance(value, DType):
        return hf.astype(x, value)
    if callable(value):
        return value(x)
    return x * value


class Holder:
    value: Any

    def method(self, x: Any) -> Any:
        return use(x, self.value)

    @property
    def computed(self) -> Any:
        return self.value

    def __call__(self, x: Any) -> Any:
        return self.method(x)

    def __getitem__(self, key: str) -> Any:
        return self.value if key == "value" else None


class Slotted:
    __slots__ = ("value",)
    value: Any


class Inheriting(Holder):
    """Is read by the methods that Python calls by itself, and by `super`."""

    def method(self, x: Any) -> Any:
        return super().method(x)

    def __mul__(self, x: Any) -> Any:
        return use(x, self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.value])

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name != "missing":
            raise AttributeError(name)
        return self.__dict__["value"]


class Items(list[Any]):
    value: Any = None

    def method(self, x: Any) -> Any:
        return use(x, self.value)

    def __hash__(self) -> int:  # type: ignore[override]  # `subgraph` asks for it
        return id(self)


class Table(dict[str, Any]):
    value: Any

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Number(int):
    value: Any


class Described:
    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self if owner is None else owner.held


class Stored:
    """A descriptor that keeps its value in the object, by a name that it computes."""

    def __set_name__(self, _: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return getattr(owner, "_" + self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner, "_" + self.name, value)


class WithStored:
    value = Stored()


class Shared:
    """A descriptor that keeps its value itself, for objects and classes."""

    held: Any = None

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self.held


class Watching:
    """Computes each attribute."""

    value: Any

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class WithDescriptor:
    value = Described()
    held: Any


class Named(NamedTuple):
    other: int
    value: Any


def in_global(source: str, **scope: Any) -> Place:
    """A place of which programs in a module of their own read."""
    scope |= {"use": use, "hf": hf, "partial": partial}
    exec(compile(source, "program.py", "exec"), scope)

    def bind(value: Any) -> None:
        scope["bind"](value) if "bind" in scope else scope.update(value=value)

    return Place(bind, scope["read"])


def attribute(owner: Any, read: Read) -> Place:
    return Place(lambda value: setattr(owner, "value", value), read)


def of_cell() -> Place:
    value: Any = None

    def bind(new: Any) -> None:
        nonlocal value
        value = new

    return Place(bind, lambda x: use(x, value))


def of_cell_of_helper() -> Place:
    place = of_cell()
    return Place(place.bind, lambda x: place.read(x))


def of_method() -> Place:
    holder = Holder()
    return attribute(holder, holder.method)


def of_callable() -> Place:
    holder = Holder()
    return attribute(holder, holder)


def of_nested_attribute() -> Place:
    outer: Any = Slotted()
    outer.value = Holder()
    return attribute(outer.value, lambda x: use(x, outer.value.value))


def of_replaced_object() -> Place:
    outer: Any = Slotted()
    outer.value = Holder()

    def bind(value: Any) -> None:
        outer.value = Holder()
        outer.value.value = value

    return Place(bind, lambda x: outer.value(x))


def of_slot() -> Place:
    slotted = Slotted()
    return attribute(slotted, lambda x: use(x, slotted.value))


def of_property() -> Place:
    holder = Holder()
    return attribute(holder, lambda x: use(x, holder.computed))


def of_own_item() -> Place:
    holder = Holder()
    return attribute(holder, lambda x: use(x, holder["value"]))


def of_getattr() -> Place:
    holder, name = Holder(), "value"
    return attribute(holder, lambda x: use(x, getattr(holder, name, None)))


def of_class() -> Place:
    cls = type("Config", (), {"value": None})
    return attribute(cls, lambda x: use(x, cls.value))  # type: ignore[attr-defined]


def of_class_of_object() -> Place:
    cls: Any = type("Config", (), {"value": None})
    config = cls()

    def bind(value: Any) -> None:
        is_function = isinstance(value, FunctionType)
        cls.value = staticmethod(value) if is_function else value

    return Place(bind, lambda x: use(x, config.value))


def of_module() -> Place:
    module = ModuleType("settings")
    return attribute(module, lambda x: use(x, module.value))


def of_list() -> Place:
    items = [None, None]
    return Place(lambda v: items.__setitem__(1, v), lambda x: use(x, items[-1]))


def of_row() -> Place:
    rows, k = [[None], [None]], 0

    def bind(value: Any) -> None:
        rows[1] = [value]

    return Place(bind, lambda x: use(x, rows[k + 1][k]))


def of_loop() -> Place:
    holders = [Holder(), Holder()]
    holders[0].value = None

    def read(x: Any) -> Any:
        for holder in holders:
            x = holder(x)
        return x

    return attribute(holders[1], read)


def of_dict() -> Place:
    table: dict[str, Any] = {"other": 1}
    return Place(lambda v: table.update(value=v), lambda x: use(x, table["value"]))


def of_get() -> Place:
    table: dict[str, Any] = {"other": 1}
    return Place(lambda v: table.update(value=v), lambda x: use(x, table.get("value")))


def of_default() -> Place:
    def read(x: Any, value: Any = None) -> Any:
        return use(x, value)

    def bind(value: Any) -> None:
        read.__defaults__ = (value,)

    return Place(bind, read)


def of_keyword_default() -> Place:
    def read(x: Any, *, value: Any = None) -> Any:
        return use(x, value)

    def bind(value: Any) -> None:
        read.__kwdefaults__ = {"value": value}

    return Place(bind, lambda x: read(x))


def of_special(read: Callable[[Any, Any], Any]) -> Callable[[], Place]:
    def place() -> Place:
        holder = Inheriting()
        return attribute(holder, lambda x: read(holder, x))

    return place


def in_iteration(holder: Any, x: Any) -> Any:
    for value in holder:
        x = use(x, value)
    return x


def in_with(holder: Any, x: Any) -> Any:
    with holder as value:
        return use(x, value)


def of_descriptor() -> Place:
    owner = WithDescriptor()
    return Place(lambda v: setattr(owner, "held", v), lambda x: use(x, owner.value))


def of_function() -> Place:
    def read(x: Any) -> Any:
        return use(x, read.value)  # type: ignore[attr-defined]

    return attribute(read, read)


def of_decorator() -> Place:
    def decorated(f: Read) -> Read:
        def run(x: Any) -> Any:
            return use(f(x), run.value)  # type: ignore[attr-defined]

        return run

    read = decorated(lambda x: x + 1)
    return attribute(read, lambda x: read(x))


def of_function_of_method() -> Place:
    class Owner:
        def method(self, x: Any) -> Any:
            return use(x, self.method.value)  # type: ignore[attr-defined]

    owner = Owner()
    return attribute(Owner.method, lambda x: owner.method(x))


def of_instance(owner: Any) -> Callable[[], Place]:
    """An attribute of an object that is more than its attributes."""
    return lambda: attribute(owner, lambda x: use(x, owner.value))


def of_subclass() -> Place:
    items = Items()
    return attribute(items, lambda x: items.method(x))


def of_class_of_subclass() -> Place:
    cls: Any = type("Part", (Table,), {"value": None})
    table = cls()

    def bind(value: Any) -> None:
        cls.value = staticmethod(value) if isinstance(value, FunctionType) else value

    return Place(bind, lambda x: use(x, table.value))


def of_class_member(of_object: bool) -> Callable[[], Place]:
    """A name in a class that had a descriptor at first."""

    def place() -> Place:
        shared = Shared()
        cls: Any = type("Owner", (), {"value": shared})
        owner = cls() if of_object else cls

        def bind(value: Any) -> None:
            if isinstance(value, str):  # not a descriptor any more
                cls.value = value
            else:
                cls.value, shared.held = shared, value

        return Place(bind, lambda x: use(x, owner.value))

    return place


def of_metaclass() -> Place:
    meta: Any = type("Meta", (type,), {"value": None})
    cls: Any = meta("Config", (), {})

    def bind(value: Any) -> None:
        is_function = isinstance(value, FunctionType)
        meta.value = staticmethod(value) if is_function else value

    return Place(bind, lambda x: use(x, cls.value))


def of_computed_name() -> Place:
    holder, name = Holder(), "al"
    return attribute(holder, lambda x: use(x, getattr(holder, f"v{name}ue")))


SETTINGS: Any = ModuleType("hopflow_test_settings.inner")
PACKAGE: Any = ModuleType("hopflow_test_settings")
PACKAGE.inner, PACKAGE.__path__ = SETTINGS, []
INNER: Final = SETTINGS.__name__
sys.modules |= {module.__name__: module for module in (SETTINGS, PACKAGE)}


def of_import(statement: str, name: str) -> Callable[[], Place]:
    """A module that is imported within the function."""
    source = f"def read(x):\n  {statement}\n  return use(x, {name})"
    return lambda: attribute(SETTINGS, in_global(source).read)


def of_partial(held: Any, bind: str, read: str) -> Callable[[], Place]:
    """What is held by the partial that is jitted."""
    source = f"def bind(value): {bind}\ndef f(h, x): return use(x, {read})"

    def place() -> Place:
        scope: dict[str, Any] = {"use": use, "held": held}
        exec(source, scope)
        f, is_keyword = scope["f"], held is KEYWORDS
        read = partial(lambda x, h: f(h, x), h=held) if is_keyword else partial(f, held)
        return Place(scope["bind"], read)

    return place


KEYWORDS: Final[dict[str, Any]] = {"value": None}


def of_partial_of_partial() -> Place:
    held: list[Any] = [None]
    inner = partial(lambda a, h, x: use(x * a, h[0]), 2.0)
    return Place(lambda value: held.__setitem__(0, value), partial(inner, held))


def of_keywords_of_partial() -> Place:
    read = partial(use, value=None)
    return Place(lambda value: read.keywords.update(value=value), read)


def of_super(of_object: bool) -> Callable[[], Place]:
    """A method of a base class."""

    def place() -> Place:
        class Base:
            def method(self, x: Any) -> Any:
                return x

            @classmethod
            def made(cls, x: Any) -> Any:
                return x

        class Middle(Base):
            pass

        class Derived(Middle):
            def method(self, x: Any) -> Any:
                return super().method(x) + 1

            @classmethod
            def made(cls, x: Any) -> Any:
                return super().made(x) + 1

        base, derived = cast(Any, Base), Derived()
        rebound = list[Any]()

        def bind(value: Any) -> None:
            # Each function has code of its own, and the last ones another place.
            source = f"lambda self, x: use(x, {len(rebound)} * 0 or value)"
            f = eval(source, {"use": use, "value": value})
            rebound.append(value)
            owner: Any = Middle if len(rebound) > 3 else base
            owner.method, owner.made = f, classmethod(f)

        if of_object:
            return Place(bind, lambda x: derived.method(x))
        return Place(bind, lambda x: Derived.made(x))

    return place


def of_super_attribute() -> Place:
    class Base:
        value: Any = None

    class Derived(Base):
        def method(self, x: Any) -> Any:
            return use(x, super().value)

    derived = Derived()

    def bind(value: Any) -> None:
        is_function = isinstance(value, FunctionType)
        cast(Any, Base).value = staticmethod(value) if is_function else value

    return Place(bind, lambda x: derived.method(x))


def of_named_tuple() -> Place:
    named = Named(1, None)

    def bind(value: Any) -> None:
        nonlocal named
        named = Named(1, value)

    return Place(bind, lambda x: use(x, named.value))


def of_items() -> Place:
    """A list of which all is read, in ways that name no item."""
    items: list[Any] = [None, None]

    def read(x: Any) -> Any:
        for value in [item for item in items if item is not x]:
            x = use(x, value)
        return use(sum(map(lambda v: use(x, v), items)), None)

    return Place(lambda value: items.__setitem__(0, value), read)


def of_keywords() -> Place:
    keywords: dict[str, Any] = {}
    return Place(lambda v: keywords.update(value=v), lambda x: use(x, **keywords))


def of_context_variable() -> Place:
    variable = ContextVar[Any]("variable")

    def bind(value: Any) -> None:
        variable.set(value)

    return Place(bind, lambda x: use(x, variable.get(None)))


def of_weak_reference() -> Place:
    holder = Holder()
    reference: Any = weakref.ref(holder)
    return attribute(holder, lambda x: use(x, reference().value))


PLACES: dict[str, Callable[[], Place]] = {
    "global": lambda: in_global("def read(x): return use(x, value)"),
    "global of a helper": lambda: in_global(
        "def helper(x): return use(x, value)\ndef read(x): return helper(x)"
    ),
    "partial": lambda: in_global(
        "def bind(v):\n  global read_value\n  read_value = partial(use, value=v)\n"
        "def read(x): return read_value(x)"
    ),
    "function made anew": lambda: in_global(
        "def bind(v):\n  global read_value\n  read_value = lambda x: use(x, v)\n"
        "def read(x): return read_value(x)"
    ),
    "jitted function made anew": lambda: in_global(
        "def bind(v):\n  global jitted\n  jitted = hf.jit(lambda x: use(x, v))\n"
        "def read(x): return jitted(x)"
    ),
    "cell": of_cell,
    "cell of a helper": of_cell_of_helper,
    "method": of_method,
    "callable": of_callable,
    "nested attribute": of_nested_attribute,
    "replaced object": of_replaced_object,
    "slot": of_slot,
    "property": of_property,
    "__getitem__": of_own_item,
    "getattr": of_getattr,
    "class": of_class,
    "class of an object": of_class_of_object,
    "module": of_module,
    "list": of_list,
    "row": of_row,
    "loop": of_loop,
    "dict": of_dict,
    "get": of_get,
    "default": of_default,
    "keyword default": of_keyword_default,
    "super": of_special(lambda holder, x: holder.method(x)),
    "operator": of_special(lambda holder, x: holder * x),
    "iteration": of_special(in_iteration),
    "with": of_special(in_with),
    "__getattr__": of_special(lambda holder, x: use(x, holder.missing)),
    "__dict__": of_special(lambda holder, x: use(x, holder.__dict__["value"])),
    "vars": of_special(lambda holder, x: use(x, vars(holder)["value"])),
    "what a function returns": of_special(
        lambda holder, x: use(x, (lambda: holder)().value)
    ),
    "one of two": of_special(
        lambda holder, x: use(x, (holder if x.ndim < 9 else X).value)
    ),
    "descriptor": of_descriptor,
    "named tuple": of_named_tuple,
    "super of an object": of_super(of_object=True),
    "super of a class": of_super(of_object=False),
    "attribute of super": of_super_attribute,
    "dict in a partial": of_partial({}, "held['value'] = value", "h['value']"),
    "list in a partial": of_partial([0], "held[0] = value", "h[0]"),
    "object in a partial": of_partial(Holder(), "held.value = value", "h.value"),
    "keyword of a partial": of_partial(KEYWORDS, "held.update(v=value)", "h['v']"),
    "partial of a partial": of_partial_of_partial,
    "keywords of a partial": of_keywords_of_partial,
    "import": of_import(
        "import hopflow_test_settings.inner", "hopflow_test_settings.inner.value"
    ),
    "import as": of_import("import hopflow_test_settings.inner as m", "m.value"),
    "import from": of_import("from hopflow_test_settings.inner import value", "value"),
    "import of a module from": of_import(
        "from hopflow_test_settings import inner", "inner.value"
    ),
    "relative import": of_import(
        "global __package__; __package__ = 'hopflow_test_settings'; "
        "from .inner import value as v",
        "v",
    ),
    "sys.modules": of_import("import sys", f"sys.modules['{INNER}'].value"),
    "sys.modules by a variable": of_import(
        f"import sys; name = '{INNER}'; modules = sys.modules", "modules[name].value"
    ),
    "getattr of sys.modules": of_import(
        "import sys", f"getattr(sys.modules['{INNER}'], 'value')"
    ),
    "vars of sys.modules": of_import(
        "import sys", f"vars(sys.modules['{INNER}'])['value']"
    ),
    "__dict__ of a module": of_import(
        f"from {INNER.partition('.')[0]} import inner", "inner.__dict__['value']"
    ),
    "sys.modules.get": of_import("import sys", f"sys.modules.get('{INNER}').value"),
    "package in sys.modules": of_import(
        "import sys", f"sys.modules['{INNER.partition('.')[0]}'].inner.value"
    ),
    "import_module": of_import(
        "import importlib", f"importlib.import_module('{INNER}').value"
    ),
    "import_module by a variable": of_import(
        f"from importlib import import_module; name = '{INNER}'",
        "import_module(name).value",
    ),
    "thread-local": of_instance(threading.local()),
    "stored by a descriptor": of_instance(WithStored()),
    "held by a descriptor": of_class_member(of_object=True),
    "held by a descriptor of a class": of_class_member(of_object=False),
    "metaclass": of_metaclass,
    "__getattribute__": of_instance(Watching()),
    "computed name": of_computed_name,
    "function": of_function,
    "decorator": of_decorator,
    "function of a method": of_function_of_method,
    "subclass of list": of_subclass,
    "subclass of dict": of_instance(Table()),
    "subclass of int": of_instance(Number(3)),
    "class of a subclass": of_class_of_subclass,
    "items": of_items,
    "keywords": of_keywords,
    "globals()": lambda: in_global("def read(x): return use(x, globals()['value'])"),
    "globals() by a variable": lambda: in_global(
        "def read(x):\n  name = 'value'\n  return use(x, globals()[name])"
    ),
    "globals().get": lambda: in_global(
        "def read(x): return use(x, globals().get('value'))"
    ),
    "globals in a variable": lambda: in_global(
        "def read(x):\n  scope = globals()\n  return use(x, scope['value'])"
    ),
    "context variable": of_context_variable,
    "weak reference": of_weak_reference,
}


def of_buffers(held: Any) -> Any:
    return lambda number: held.__setitem__(0, number), lambda: held[0]


def of_proxy() -> Any:
    held = {"k": 0}
    proxy = MappingProxyType(held)
    return lambda number: held.update(k=number), lambda: proxy["k"]


def of_mapping(held: Any) -> Any:
    return lambda number: held.update(k=number), lambda: held["k"]


def test_a_context_variable_that_gets_its_first_value_is_seen() -> None:
    variable = ContextVar[Any]("variable")
    f = hf.jit(lambda x: x * variable.get(3.0))
    agree(f(X), X * 3.0)
    variable.set(5.0)
    agree(f(X), X * 5.0)


@pytest.mark.parametrize(
    "place",
    [
        lambda: of_buffers(bytearray(2)),
        lambda: of_buffers(memoryview(bytearray(2))),
        lambda: of_buffers(array("d", [0.0, 0.0])),
        lambda: of_buffers(deque([0])),
        lambda: of_buffers(UserList([0])),
        of_proxy,
        lambda: of_mapping(UserDict()),
        lambda: of_mapping(ChainMap()),
    ],
)
def test_items_of_other_containers_are_seen(place: Any) -> None:
    bind, read = place()
    f = hf.jit(lambda x: x * read())
    for number in (1, 5, 2, 5):
        bind(number)
        agree(f(X), X * number)
        with traces(0):
            agree(f(X), X * number)


def jit(f: Read) -> Read:
    made: Read = hf.jit(f)
    return made


def total(read: Read) -> Read:
    return lambda x: hf.sum(read(x))


class Model:
    def __init__(self, read: Read) -> None:
        self.read = read

    def step(self, x: Any) -> Any:
        return self.part(x)

    def part(self, x: Any) -> Any:
        return self.read(x)

    run = hf.jit(step)


def in_method(read: Read) -> Read:

    model = Model(read)
    return lambda x: model.run(x)


def in_subgraph(read: Read) -> Read:
    part = hf.subgraph(read)
    return jit(lambda x: hf.sum(part(x)) + hf.sum(part(x + 1)))


def in_jitted_function(read: Read) -> Read:
    inner = hf.jit(read)
    return jit(lambda x: inner(x))


def in_defined_function(read: Read) -> Read:
    def run(x: Any) -> Any:
        def inner(y: Any) -> Any:
            return read(y)

        return inner(x)

    return jit(run)


WAYS: dict[str, Callable[[Read], Read]] = {
    "jit": hf.jit,
    "jit, dynamic": lambda read: hf.jit(read, dynamic=True),
    "helper": lambda read: hf.jit(lambda x: read(x) + 1),
    "defined within": in_defined_function,
    "method": in_method,
    "jit in jit": in_jitted_function,
    "argument": lambda read: partial(hf.jit(lambda f, x: f(x)), read),
    "subgraph": hf.subgraph,
    "subgraph in jit": in_subgraph,
    "cond": lambda read: hf.jit(
        lambda x: hf.cond(hf.sum(x) > 0, total(read), lambda x: hf.sum(x) * 0, (x,))
    ),
    "while_loop": lambda read: hf.jit(
        lambda x: hf.while_loop(
            lambda i, c: i < 2, lambda i, c: (i + 1, c + hf.sum(read(x))), (0, 0.0)
        )
    ),
    "scan": lambda read: hf.jit(
        lambda x: hf.scan(lambda c, e: (c + hf.sum(read(e)), hf.sum(c)), 0.0, x)
    ),
    "map": lambda read: hf.jit(lambda x: hf.map(total(read), x)),
    "vmap in jit": lambda read: hf.jit(hf.vmap(total(read))),
    "vmap": lambda read: hf.vmap(hf.jit(total(read))),
    "grad in jit": lambda read: hf.jit(hf.grad(total(read))),
    "grad": lambda read: hf.grad(hf.jit(total(read))),
    "checkpoint": lambda read: hf.jit(hf.grad(hf.checkpoint(total(read)))),
}


# --- tests ---------------------------------------------------------------------------


def double(x: Any) -> Any:
    return x + x


def values() -> dict[str, Any]:
    """Values of each kind that a place may have."""
    return {
        "tensor": hf.full((3,), 2.0),
        "another": hf.full((3,), 3.0),
        "float64": hf.full((3,), 2.0, dtype=hf.float64),
        "matrix": hf.full((2, 3), 2.0),
        "scalar": hf.asarray(4.0),
        "array": np.full((3,), 5.0, np.float32),
        "number": 2.5,
        "another number": -0.5,
        "int": 1,
        "flag": True,
        "other flag": False,
        "None": None,
        "text": "sin",
        "another text": "cos",
        "function": double,
        "lambda": lambda x: x * x,
        "dtype": hf.float64,
        "nested": {"first": hf.full((3,), 2.0), "rest": [None]},
        "another nested": {"first": 2.0, "rest": ["tanh"]},
    }


KINDS = list(values())


def check(place: str, way: str, kinds: list[str]) -> None:
    """Check that a function agrees with what it is in Python, whatever is bound."""
    bind, read = PLACES[place]()
    run = WAYS[way](read)
    known = values()
    for kind in kinds:
        bind(known[kind])
        with hf.debug():
            expected = run(X)
        agree(run(X), expected)
        agree(run(X), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_a_rebound_value_is_seen(place: str, way: str) -> None:
    check(place, way, ["tensor", "another", "number", "another number", "None"])


@pytest.mark.parametrize("place", PLACES)
def test_whatever_kind_of_value_is_bound_it_is_seen(place: str) -> None:
    check(place, "jit", [*KINDS, *KINDS[::-1]])


@given(
    place=st.sampled_from(sorted(PLACES)),
    way=st.sampled_from(sorted(WAYS)),
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_jit_and_debug_agree_after_any_rebinding(
    place: str, way: str, kinds: list[str]
) -> None:
    check(place, way, kinds)


@contextmanager
def traces(count: int) -> Iterator[None]:
    """The block traces so many functions."""
    before = hf.stats().traces
    yield
    assert hf.stats().traces - before == count


@pytest.mark.parametrize("place", ["global", "cell", "method", "loop", "default"])
def test_tensors_are_operands_and_the_rest_decides(place: str) -> None:
    bind, read = PLACES[place]()
    f = hf.jit(read)
    for value, count in [
        (hf.full((3,), 2.0), 1),
        (hf.full((3,), 3.0), 0),
        (hf.asarray(np.ones((3, 3), np.float32)[:, 0]), 0),
        (hf.full((2, 3), 3.0), 1),
        (4.5, 1),
        (4.5, 0),
        (float("nan"), 1),
        (float("nan"), 0),
        (0.0, 1),
        (-0.0, 1),
        (True, 1),
        (1, 1),
        (hf.full((3,), 2.0), 0),
        (np.full(3, 2.0), 1),
        (np.full(3, 2.0), 0),
    ]:
        bind(value)
        with traces(count):
            got = f(X)
        agree(got, read(X))


# --- keys -----------------------------------------------------------------------------


KEYS: dict[str, tuple[Any, ...]] = {
    "int": (0, 1, -1),
    "slice": (slice(0, 2), slice(1, 3), None, Ellipsis),
    "list": ([0], [2], [0, 1]),
    "tuple": ((0,), (2,), (slice(1, 2),)),
    "array": (np.array([0, 1]), np.array([1, 2]), np.array([2])),
    "mask": (np.array([True, False, False]), np.array([False, True, True])),
    "mask tensor": (hf.asarray([True, False, False]), hf.asarray([False, True, True])),
    "scalar tensor": (hf.asarray(0), hf.asarray(1), hf.asarray(2)),
    "tensor": (hf.asarray([0, 1]), hf.asarray([1, 2]), hf.asarray([2])),
}


def in_statement(code: str) -> Callable[[], Place]:
    """A function of `x` with a key that is a global of its module."""
    return lambda: in_global(f"def read(x): {code}")


def of_cell_as_key() -> Place:
    value: Any = None

    def bind(new: Any) -> None:
        nonlocal value
        value = new

    return Place(bind, lambda x: x[value])


KEYED: dict[str, Callable[[], Place]] = {
    "argument": in_statement("return x[value]"),
    "local": in_statement("y = x + 1; return y[value]"),
    "local key": in_statement("key = value; return x[key]"),
    "row": in_statement("return hf.stack([x, x])[0][value]"),
    "attribute": in_statement("return x.at[value].set(9.0)"),
    "closure": of_cell_as_key,
    "dict": in_statement("rows = {'w': x}; return rows['w'][value]"),
    "tuple": in_statement("rows = x, x; k = 1; return rows[k][value]"),
    "write": in_statement("y = x + 0; y[value] = 1.0; return y"),
}


def check_key(place: str, run: Callable[[Read], Read], keys: tuple[Any, ...]) -> None:
    bind, read = KEYED[place]()
    f = run(read)
    for key in (*keys, *keys):
        bind(key)
        agree(f(X), read(X))
        agree(f(X), read(X))


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("place", KEYED)
def test_a_rebound_key_of_what_the_trace_has_is_seen(place: str, kind: str) -> None:
    check_key(place, hf.jit, KEYS[kind])


@pytest.mark.parametrize("way", ["helper", "subgraph in jit", "grad in jit", "cond"])
def test_a_rebound_key_is_seen_in_what_jit_calls(way: str) -> None:
    bind, read = KEYED["argument"]()
    f = WAYS[way](read)
    for key in (0, 1, 0, 2):
        bind(key)
        with hf.debug():
            expected = f(X)
        agree(f(X), expected)


def test_a_rebound_key_is_seen_in_the_body_of_a_scan() -> None:
    bind, read = KEYED["argument"]()
    f = hf.jit(lambda x: hf.scan(lambda c, r: (c + read(r), c), 0.0, x)[0])
    rows = hf.reshape(hf.arange(6.0), (2, 3))
    for key in (0, 1, 2, 0):
        bind(key)
        agree(f(rows), hf.sum(rows[:, key]))


def test_a_rebound_key_of_an_argument_that_is_a_container_is_seen() -> None:
    key: Any = "a"
    f = hf.jit(lambda p: p["rows"][key] * p["scale"][key])
    p = {"rows": {"a": X, "b": X + 1}, "scale": {"a": X, "b": 2 * X}}
    for key in ("a", "b", "a"):
        agree(f(p), p["rows"][key] * p["scale"][key])


def test_a_rebound_axis_and_name_of_an_attribute_are_seen() -> None:
    axis, name = 0, "ndim"
    f = hf.jit(lambda x: x * x.shape[axis] + getattr(x, name))
    x = hf.ones((2, 3))
    for axis, name in ((0, "ndim"), (1, "ndim"), (1, "size"), (0, "size")):
        agree(f(x), x * x.shape[axis] + getattr(x, name))


ELEMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "float": lambda x, s: x * float(s),
    "int": lambda x, s: x[int(s)],
    "bool": lambda x, s: x if s else -x,
    "item": lambda x, s: x * s.item(),
    "tolist": lambda x, s: x * s.tolist(),
    "index": lambda x, s: sum([x] * s.__index__()),
    "NumPy": lambda x, s: x * float(np.asarray(s)),
    "text": lambda x, s: x * len(repr(s).partition("1")[0]),
    "subscript": lambda x, s: x[s],
    "write": lambda x, s: x.at[s].set(9.0),
}


@pytest.mark.parametrize("way", ["jit", "helper", "subgraph in jit", "jit in jit"])
@pytest.mark.parametrize("what", ELEMENTS)
def test_elements_that_python_is_given_are_compared(what: str, way: str) -> None:
    held = hf.asarray(1)
    f = WAYS[way](lambda x: ELEMENTS[what](x, held))

    def check() -> None:
        with hf.debug():
            expected = f(X)
        agree(f(X), expected)
        with traces(0):
            agree(f(X), expected)

    check()
    held = hf.asarray(2)
    check()
    held[...] = 1
    check()


def test_explanations_name_a_tensor_whose_elements_decide() -> None:
    mask = hf.asarray([True, False, False])
    f = hf.jit(lambda x: x[mask])
    f(X)
    assert f.explain(X) == "runs what has been compiled"
    mask[1] = True
    assert "what `closure mask` contains has changed" in f.explain(X)
    mask = hf.asarray([True, False, False])
    assert f.explain(X) == "runs what has been compiled"


def test_explanations_name_a_key() -> None:
    bind, read = KEYED["argument"]()
    f = hf.jit(read)
    bind(0)
    f(X)
    bind(1)
    assert f.explain(X) == "recompiled because `global value` was 0, and is 1"


@pytest.mark.parametrize("place", ["argument", "local key", "closure", "attribute"])
def test_a_trace_function_sees_keys(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_events", watch.by_tracing)
    check_key(place, hf.jit, KEYS["int"])


# --- what explanations say ------------------------------------------------------------


SAID = {
    "global": "global value",
    "global of a helper": "global value",
    "cell": "closure value",
    "method": "self.value",
    "callable": "self.value",
    "nested attribute": "outer.value.value",
    "list": "items[-1]",
    "dict": 'table["value"]',
    "class": "cls.value",
    "module": "module.value",
    "default": "default value",
    "keyword default": "default value",
}


@pytest.mark.parametrize("place", SAID)
def test_explanations_name_the_path(place: str) -> None:
    bind, read = PLACES[place]()
    f = hf.jit(read)
    bind(2.0)
    f(X)
    assert f.explain(X) == "runs what has been compiled"
    for value, text in {
        3.0: "was 2.0, and is 3.0",
        None: "was 2.0, and is None",
        X: "was 2.0, and is f32[3]",
        len: "was 2.0, and is `len`",
    }.items():
        bind(value)
        text = f"recompiled because `{SAID[place]}` {text}"
        assert f.explain(X).partition(" and `")[0] == text


# --- how code is watched --------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["global of a helper", "cell", "method", "loop", "get"]
)
def test_a_trace_function_sees_the_same(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_events", watch.by_tracing)
    seen = []

    def debugger(frame: Any, event: str, _: Any) -> Any:
        seen.append((frame.f_code.co_name, event))
        return debugger

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        check(place, "scan", ["tensor", "another", "number", "None"])
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert ("use", "line") in seen


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is no `sys.monitoring`")
def test_other_tools_may_have_all_that_there_is() -> None:
    monitoring: Any = sys.monitoring
    free = [n for n in (3, 4) if monitoring.get_tool(n) is None]
    for n in free:
        monitoring.use_tool_id(n, "test")
    try:
        check("global", "jit", ["tensor", "another", "number", "None"])
    finally:
        for n in free:
            monitoring.free_tool_id(n)
    check("global", "jit", ["tensor", "number"])
    assert all(monitoring.get_tool(n) is None for n in free)


def test_another_module_of_the_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    f = hf.jit(lambda x: x * sys.modules["hopflow_test_other"].value)
    for value in (2.0, 3.0):
        module: Any = ModuleType("hopflow_test_other")
        module.value = value
        monkeypatch.setitem(sys.modules, module.__name__, module)
        agree(f(X), X * value)


def _closure(x: Any) -> Any:
    def outer(v: Any, u: Any) -> Any:
        def inner(w: Any) -> Any:
            return hf.sum(x) + w

        return hf.invoke_subgraph(inner, v * 0) + u * 0

    return outer


def _helper(x: Any) -> Any:
    def outer(v: Any, u: Any) -> Any:
        def read() -> Any:
            return hf.sum(x)

        def inner(w: Any) -> Any:
            return read() + w

        return hf.invoke_subgraph(inner, v * 0) + u * 0

    return outer


def _partial(x: Any) -> Any:
    def outer(v: Any, u: Any) -> Any:
        def inner(number: Any, w: Any) -> Any:
            return hf.sum(x) * number + w

        return hf.invoke_subgraph(partial(inner, 1.0), v * 0) + u * 0

    return outer


def _default(x: Any) -> Any:
    def outer(v: Any, u: Any) -> Any:
        def inner(w: Any, y: Any = x) -> Any:
            return hf.sum(y) + w

        return hf.invoke_subgraph(inner, v * 0) + u * 0

    return outer


def _local(x: Any) -> Any:
    def outer(v: Any, u: Any) -> Any:
        pair = [x, 1.0]

        def inner(w: Any) -> Any:
            return hf.sum(pair[0]) + w

        return hf.invoke_subgraph(inner, v * 0) + u * 0

    return outer


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("make", [_closure, _helper, _partial, _default, _local])
def test_a_subgraph_in_a_subgraph_reads_what_is_there_in_each_call(
    make: Any, dynamic: bool | None
) -> None:
    """The second trace of `outer` uses that of `inner` again, whose function is another
    one in each call."""
    box: dict[str, Any] = {}

    def program() -> Any:
        x = box["x"]
        outer, zero = make(x), hf.sum(x) * 0
        first = hf.invoke_subgraph(outer, zero, zero)
        return first, hf.invoke_subgraph(outer, first, zero)

    jitted = hf.jit(program, dynamic=dynamic)
    for k, n in enumerate((4, 3, 3, 3, 4)):
        box["x"] = hf.asarray(np.full(n, float(k)))
        assert [float(v) for v in jitted()] == [float(n * k)] * 2
