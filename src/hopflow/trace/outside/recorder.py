"""Records what traced code reads from outside, by following the objects that it knows.

An object from outside is told by its identity from what the code has made: the function
itself, those of its arguments that are no data, and what names of modules and of
enclosing functions hold come from outside, and so does what is read from such objects.
Each read is of a slot of a known object, and so has an access path.
"""

import inspect
import io
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import resolve_name
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.bind import Value
from hopflow.graph.core import SourceLine
from hopflow.tensor import EagerTensor
from hopflow.trace.outside.bytecode import Load, Step, globals_of, stores_of
from hopflow.trace.outside.checks import Check, elements, identity
from hopflow.trace.outside.effects import Effects
from hopflow.trace.outside.guard import Guard, Read, Wanted
from hopflow.trace.outside.modules import is_library, is_library_module
from hopflow.trace.outside.objects import (
    BOXES,
    BUFFERS,
    CONTAINERS,
    all_attributes,
    attributes_of,
    cells_of,
    content_of,
    content_of_box,
    has_identity,
    held_by,
    inner_codes,
    is_computed,
    is_constant,
    is_data_descriptor,
    is_iterator,
    is_key,
    is_library_collection,
    is_of_trace,
    is_open,
    is_plain,
    is_tree,
    is_users_class,
    may_have,
    misses_of,
)
from hopflow.trace.outside.paths import MISSING, Path, member_of
from hopflow.tracebacks import is_own_file

Found: TypeAlias = tuple[Path, Any]
"""A value from outside, and the path that leads to it."""


class _Use:
    """A container or an array of which code may have read anything.

    parts     what it contained at the first use, at any depth; with a condition, itself
    seen      containers whose parts are there
    count     how often it was used
    is_last   whether the last use may have been an argument of a call
    """

    __slots__ = ("count", "is_last", "parts", "seen")

    def __init__(self) -> None:
        self.parts: list[tuple[Path, Any, Check | None]] = []
        self.seen: set[int] = set()
        self.count = 0
        self.is_last = False


class Recorder:
    """The reads of one trace.

    A value is checked against what it was when it was read first. A trace that has
    changed something from outside serves no other call, so that what it reads and
    changes needs no check; one that found all as it would leave it (`self.mode = "x"`
    where it is so) is valid as long as that is so.

    Args:
        is_of_body: Whether the trace may be used again within other traces, where what
            are tensors with memory here are tensors of these.
    """

    def __init__(self, *, is_of_body: bool = False) -> None:
        self.effects = Effects()
        self._tensor = "operand" if is_of_body else "tensor"
        self._reads: dict[Path, list[Check]] = {}
        self._paths: dict[tuple[Any, ...], Path] = {}
        self._objects: dict[int, tuple[Any, Path]] = {}  # alive, so ids stay theirs
        self._functions: dict[int, list[tuple[FunctionType, Path]]] = {}  # by code
        self._around: dict[int, CodeType] = {}  # where the code of a function stands
        self._uses: dict[Path, _Use] = {}
        self._callables: dict[int, Any] = {}  # those that were taken note of
        self._trees: dict[type, bool] = {}  # classes: whether they are registered
        self._added: dict[tuple[int, ...], Any] = {}  # alive, as these too
        self._bound: dict[tuple[int, Step], Found] = {}  # by owners, what code binds
        self._bound_variables: dict[Path, Callable[[], Any]] = {}  # and what they hold

    def path(self, parent: Path | None, kind: str, key: Any, scope: Any = None) -> Path:
        """The path of a step; the same one for the same step."""
        place = scope if isinstance(scope, int) else id(scope)
        at = (id(parent), kind, type(key), key, place)
        known = self._paths.get(at)
        if known is None:
            known = self._paths[at] = Path(parent, kind, key, scope)
        return known

    # --- what is known from the beginning ---

    def add_root(self, value: Any, path: Path) -> None:
        """Take note of an object from outside that itself needs no check."""
        if is_of_trace(value) or is_constant(value):
            return
        self._reads.setdefault(path, [])
        self._know(value, path)
        self._note_callable(value, path)

    def _know(self, value: Any, path: Path) -> None:
        """Take note of an object from outside."""
        self._objects.setdefault(id(value), (value, path))
        self.effects.know(value, path.text)

    def _note_callable(self, value: Any, path: Path) -> None:
        """Take note of the functions that a call of an object may run."""
        if id(value) in self._callables:
            return
        self._callables[id(value)] = value
        if isinstance(value, FunctionType):
            functions = self._functions.setdefault(id(value.__code__), [])
            functions.append((value, path))
            if not _is_users(value):
                cells = cells_of(value)
                parts = [(self.path(path, "cell", n, at), x) for at, n, x in cells]
                self._note_parts(parts)
        elif isinstance(value, MethodType):
            self._note_callable(value.__func__, path)
            self.add_root(value.__self__, self.path(path, "attribute", "__self__"))
        elif isinstance(value, _BOUND):
            owner = value.__self__
            if not isinstance(owner, ModuleType | type):
                self.add_root(owner, self.path(path, "attribute", "__self__"))
        elif isinstance(value, partial):
            self._read_partial(value, path)
        elif isinstance(value, _CACHED):
            self.read(self.path(path, "result of", misses_of), misses_of(value))
        elif type(value).__module__.startswith("hopflow."):
            held = attributes_of(value)
            names = [(self.path(path, "attribute", k), x) for k, x in held.items()]
            self._note_parts(names)

    def _read_partial(self, value: "partial[Any]", path: Path) -> None:
        """Read what a call of a partial gives to its function: as wholes, if that is no
        code that is watched."""
        inner = self.path(path, "attribute", "func")
        self.read(inner, value.func)
        args = self.path(path, "attribute", "args")
        self.read(args, value.args)
        keywords = self.path(path, "attribute", "keywords")
        self.read(keywords, value.keywords)
        self._note(keywords, Check("keys", [*value.keywords]))
        parts = [(self.path(args, "item", k), x) for k, x in enumerate(value.args)]
        named = value.keywords.items()
        parts += [(self.path(keywords, "item", k), x) for k, x in named]
        f = value.func
        is_seen = isinstance(f, FunctionType | MethodType) and _is_users(f)
        is_seen |= isinstance(f, partial)
        for part, x in parts:
            self.read(part, x)
            if not is_seen:
                self._use(part, x)

    def _note_parts(self, parts: Iterable[Found]) -> None:
        """The same for parts of a function or an object of this package."""
        for path, part in parts:
            if isinstance(part, tuple):
                rows = [(self.path(path, "item", k), x) for k, x in enumerate(part)]
                self._note_parts(rows)
            elif callable(part) and not isinstance(part, type):
                self.add_root(part, path)

    # --- while code runs ---

    def resume(self, frame: FrameType) -> None:
        """Take note that the code of a generator goes on to run."""
        self.effects.run(frame)

    def enter(self, frame: FrameType) -> None:
        """Take note that code begins to run."""
        self.effects.run(frame)
        code, values = frame.f_code, frame.f_locals
        for inner in inner_codes(code):
            self._around[id(inner)] = code
        self._note_stores(frame)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            known = self._known(values.get(name))
            use = None if known is None else self._uses.get(known[0])
            if use is not None and use.is_last:  # it is what the caller has passed
                use.count, use.is_last = use.count - 1, False
        if id(code) not in self._functions and code.co_argcount:
            self._note_method(code, values.get(names[0]))
        for function, path in self._functions.get(id(code), ()):
            self._read_defaults(function, path, values)

    def _note_stores(self, frame: FrameType) -> None:
        """Take note of the variables from outside that code may bind anew."""
        code = frame.f_code
        for name, is_global, line in stores_of(code):
            at = SourceLine(code.co_filename, line or code.co_firstlineno)
            if is_global:
                self._bind_global(frame, name, at.line)
                continue
            for function, around, place in self._closures(code, name):
                path = self.path(around, "cell", name, place)
                cell = (function.__closure__ or ())[place]
                value = self.effects.know_variable(cell, name, at)
                self._bound_variables[path] = value

    def _bind_global(self, frame: FrameType, name: str, line: int) -> None:
        """Take note of a name of a module that code may bind anew."""
        scope = frame.f_globals
        at = SourceLine(frame.f_code.co_filename, line)
        value = self.effects.know_variable(scope, name, at)
        self._bound_variables[self.path(None, "global", name, scope)] = value

    def _note_method(self, code: CodeType, owner: Any) -> None:
        """Take note of a method that no attribute of its object led to: Python calls it
        by itself, as `__call__` and `__add__`, or it is that of `super()`."""
        cls = owner if isinstance(owner, type) else type(owner)
        path = self._class_of(owner)
        if path is None:
            return
        start = dict[str, int]()  # where the search for a name goes on
        for k, base in enumerate(cls.__mro__):
            for name, member in vars(base).items():
                value = getattr(member, "__func__", member)
                if isinstance(value, FunctionType) and value.__code__ is code:
                    found = self.path(path, "member", name, start.get(name, 0))
                    if member is not value:
                        found = self.path(found, "attribute", "__func__")
                    self.read(found, value)
                    return
            start |= dict.fromkeys(vars(base), k + 1)

    def _class_of(self, owner: Any) -> Path | None:
        """The path to the class of an object, or to the object if it is a class; None:
        nothing is read from it. Code may have made the object itself, and mostly not
        its class."""
        known = self._known(owner)
        is_class = isinstance(owner, type)
        if known is not None:
            path = known[0]
            return path if is_class else self.path(path, "attribute", "__class__")
        cls = owner if is_class else type(owner)
        if not is_users_class(cls):
            return None
        if self._known(cls) is None:
            self.add_root(cls, self.path(None, "constant", cls, cls))
        return self._objects[id(cls)][1]

    def _read_defaults(
        self, function: FunctionType, path: Path, values: Mapping[str, Any]
    ) -> None:
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for at, (name, default) in enumerate(zip(names, defaults, strict=True)):
            if values.get(name, MISSING) is default:
                self.read(self.path(path, "default", name, at), default)
        for name, default in (function.__kwdefaults__ or {}).items():
            if values.get(name, MISSING) is default:
                self.read(self.path(path, "keyword default", name), default)

    def load(self, frame: FrameType, load: Load) -> None:
        """Take note of what a chain of loads, which is about to run, reads."""
        self.effects.reach(frame)
        if load.kind == "super":
            self._read_inherited(frame, load.name)
            return
        if load.kind == "result" and load.binds is not None:
            for value, path in list(self._objects.values()):
                if is_users_class(value) and may_have(value, load.binds.key):
                    self.effects.know_attribute(value, load.binds.key, path.text)
            return
        if load.kind == "result":  # of any object that may be what this is read from
            name = load.steps[0].key
            for value, path in list(self._objects.values()):
                if may_have(value, name):
                    self._follow(frame, (path, value), load)
            return
        load = self._of_scope(frame, load)
        kind, name = load.kind, load.name
        if kind in ("modules", "globals"):
            step = self._resolved(frame, load.steps[0])
            if step.kind != "item" or not isinstance(step.key, str):
                return
            name, load = step.key, load._replace(steps=load.steps[1:])
        if kind == "modules":
            start = self._module(sys.modules.get(name), name)
        elif kind == "import":
            start = self._imported(frame, name)
        else:
            start = self._variable(frame, "global" if kind == "globals" else kind, name)
        if kind == "globals" and load.binds is not None:
            self._bind_global(frame, name, frame.f_lineno)
        for found in start:
            self._follow(frame, found, load)
        if not start and kind in ("global", "free", "local"):
            scope = frame.f_globals if kind == "global" else frame.f_locals
            self._follow_own(frame, scope.get(name, MISSING), load)

    def _of_scope(self, frame: FrameType, load: Load) -> Load:
        """A chain that begins with the modules or the globals, as they are called; any
        other one is as it was."""
        if load.kind not in ("global", "free", "local") or not load.steps:
            return load
        scope = frame.f_globals if load.kind == "global" else frame.f_locals
        value, steps = scope.get(load.name), load.steps
        if value is sys and steps[0] == Step("attribute", "modules"):
            value, steps = sys.modules, steps[1:]
        if value is sys.modules and steps:
            return load._replace(kind="modules", steps=steps)
        if value is frame.f_globals:
            return load._replace(kind="globals", steps=steps)
        return load

    def _read_inherited(self, frame: FrameType, name: str) -> None:
        """Read what `super()` gives in a method, if it is no method itself."""
        code, values = frame.f_code, frame.f_locals
        owner = values.get(code.co_varnames[0]) if code.co_argcount else None
        around = values.get("__class__")
        cls = owner if isinstance(owner, type) else type(owner)
        path = self._class_of(owner)
        if path is None or around not in cls.__mro__:
            return
        start = cls.__mro__.index(around) + 1
        value = member_of(cls, name, start)
        path = self.path(path, "member", name, start)
        if isinstance(value, staticmethod):
            self.read(self.path(path, "attribute", "__func__"), value.__func__)
        elif value is not MISSING and not hasattr(type(value), "__get__"):
            for found in self.read(path, value):
                self._use(*found)

    def _imported(self, frame: FrameType, name: str) -> list[Found]:
        """A module that code has imported, if it is a user's."""
        try:
            name = resolve_name(name, frame.f_globals.get("__package__"))
        except ImportError:
            return []
        return self._module(sys.modules.get(name), name)

    def _module(self, value: Any, name: str) -> list[Found]:
        """A module by its name, unless it is a library's."""
        if not isinstance(value, ModuleType) or is_library_module(value):
            return []
        if sys.modules.get(name) is not value:
            return []
        return self.read(self.path(None, "global", name, sys.modules), value)

    def give(self, tensor: Value) -> None:
        """Take note that Python code is given the elements of a tensor: they are
        compared, if it is from outside."""
        known = self._known(tensor)
        if known is not None:
            for path, value in self.read(*known):
                self._note(path, Check("elements", elements(value)))

    def _variable(self, frame: FrameType, kind: str, name: str) -> list[Found]:
        """What a variable holds, if it is from outside."""
        code = frame.f_code
        is_local = kind != "global" or (name in frame.f_locals and _is_scope(code))
        scope = frame.f_locals if is_local else frame.f_globals
        value = scope.get(name, MISSING)
        if value is MISSING or is_library_module(value):
            return []
        if self._known(value) is None and self.effects.is_own_variable(value):
            return []
        if not is_local:
            if is_library(frame.f_globals.get("__name__")):
                return []  # code of `hopflow.nn`, which has a user's objects
            return self.read(self.path(None, "global", name, frame.f_globals), value)
        paths = self._cells(code, name, value) if kind == "free" else []
        if paths:
            return [found for path in paths for found in self.read(path, value)]
        known = self._known(value)
        if known is None and isinstance(value, ModuleType):  # it was imported here
            return self._module(value, value.__name__)
        return [] if known is None else self.read(*known)

    def _cells(self, code: CodeType, name: str, value: Any) -> list[Path]:
        """The paths to a variable of an enclosing function that code reads by a name.

        A function that the trace itself has defined shares it with that in which it
        stands.
        """
        return [
            self.path(path, "cell", name, at)
            for function, path, at in self._closures(code, name)
            if content_of(function, at) is value
        ]

    def _closures(
        self, code: CodeType, name: str
    ) -> Iterator[tuple[FunctionType, Path, int]]:
        """The functions that may share such a variable with code: each with its path,
        and the position of the variable."""
        around: CodeType | None = code
        while around is not None and name in around.co_freevars:
            if functions := self._functions.get(id(around)):
                at = around.co_freevars.index(name)
                for function, path in functions:
                    yield function, path, at
                return
            around = self._around.get(id(around))

    def _known(self, value: Any) -> Found | None:
        known = self._objects.get(id(value))
        return None if known is None else (known[1], known[0])

    def _follow(self, frame: FrameType, start: Found, load: Load) -> None:
        """Read what the steps of a chain lead to."""
        path, value = start
        for step in load.steps:
            step = self._resolved(frame, step)
            here, found = (path, value), None
            is_module = isinstance(value, ModuleType)
            if is_module and step == Step("attribute", "__dict__"):
                continue  # its items are the attributes
            if step.kind == "attribute" or (step.kind == "item" and is_module):
                found = self._attribute(path, value, step.key)
            elif step.kind == "item":
                found = self._item(path, value, step.key)
            elif step.kind in ("attribute of", "any attribute") and is_open(value):
                self._use_attributes(path, value)
            if load.kind != "result" and _takes(step.key, value):
                self.effects.stop(value)
            if found is not None and self.effects.is_own(value, step.key, found[1]):
                return
            reads = [] if found is None else self.read(*found)
            if not reads:
                if found is None and load.kind != "result":
                    self._use(*here)
                return
            [(path, value)] = reads
        binds = None if load.binds is None else self._resolved(frame, load.binds)
        if binds is not None and self._bind(path, value, binds):
            return
        if load.is_used:
            is_passed = load.taker == "call" and is_plain(value)
            if is_passed and _copies_objects(frame):
                self._use_object(path, value)
            self._use(path, value)
            if _is_taken(load, value):
                self.effects.stop(value)

    def _bind(self, path: Path, owner: Any, step: Step) -> bool:
        """Take note of an attribute or an item that code is about to bind, which it may
        read before; False: which one is not known."""
        if step.kind == "attribute":
            self.effects.know_attribute(owner, step.key, path.text)
        elif step.kind != "item" or type(owner) not in (dict, list):
            return False
        else:
            found = self._item(path, owner, step.key)
            for read in [] if found is None else self.read(*found):
                self._use(*read)
        self._bound[id(owner), step] = path, owner
        return True

    def _follow_own(self, frame: FrameType, value: Any, load: Load) -> None:
        """Read what the steps of a chain lead to that begins with what code has made:
        it may hold objects from outside, and its class is one mostly."""
        for n, step in enumerate(load.steps):
            rest = load._replace(steps=load.steps[n:])
            if (known := self._known(value)) is not None:
                self._follow(frame, known, rest)
                return
            step = self._resolved(frame, step)
            if value is MISSING or is_of_trace(value) or is_constant(value):
                return
            if step.kind == "item" and type(value) in (dict, list, tuple):
                try:
                    value = value[step.key]
                except LookupError:
                    return
                continue
            if step.kind != "attribute" or isinstance(value, ModuleType | type):
                return
            if step.key == "__dict__":
                value = attributes_of(value)
                continue
            held = all_attributes(value)
            if step.key in held:
                value = held[step.key]
                continue
            if (path := self._class_of(value)) is not None:
                if step.key == "__class__":
                    rest = load._replace(steps=load.steps[n + 1 :])
                self._follow(frame, (path, type(value)), rest)
            return
        if load.steps and (known := self._known(value)) is not None:
            self._follow(frame, known, load._replace(steps=()))

    def _resolved(self, frame: FrameType, step: Step) -> Step:
        """A step whose key is what a variable holds, with that key."""
        if step.kind not in ("item of", "attribute of"):
            return step
        kind, name = step.key
        scope = frame.f_globals if kind == "global" else frame.f_locals
        key = scope.get(name, MISSING)
        return Step(step.kind.partition(" ")[0], key) if is_key(key) else step

    # --- reads ---

    def read(self, path: Path, value: Any) -> list[Found]:
        """Take note of a read of a slot that holds a value.

        Returns:
            The value, by the path under which it is known; nothing, if it belongs to a
            trace.
        """
        if is_of_trace(value):
            return []
        known = self._known(value)
        if known is not None and known[0] is not path and has_identity(value):
            self.read(*known)
            if path not in self._reads:
                self._reads[path] = [Check("alias", known[0])]
            return [known]
        if path not in self._reads:
            self._reads[path] = []
            self._reads[path] += self._checks(path, value)
        if not is_constant(value):
            self._know(value, path)
        return [(path, value)]

    def _checks(self, path: Path, value: Any) -> Iterator[Check]:
        """What is asked of a value that is read."""
        if is_constant(value):
            yield Check("constant", value)
            if isinstance(value, _BOUND):
                self._note_callable(value, path)
        elif isinstance(value, EagerTensor):
            yield Check(self._tensor, value.type)
        elif isinstance(value, np.ndarray):
            yield Check("array", (value.dtype, value.shape))
        elif isinstance(value, FunctionType | MethodType) and _is_users(value):
            yield _code_of(value)
            if isinstance(value, MethodType):
                owner = self.path(path, "attribute", "__self__")
                self.read(owner, value.__self__)
            self._note_callable(value, path)
        elif isinstance(value, partial):
            yield Check("class", partial)
            self._note_callable(value, path)
        elif isinstance(value, _CACHED):
            yield identity(value)
            self._note_callable(value, path)
        elif isinstance(value, CONTAINERS) or is_plain(value):
            yield Check("class", type(value))
        elif not isinstance(value, ModuleType):
            yield identity(value)
            self._note_callable(value, path)

    # --- steps ---

    def _attribute(self, path: Path, owner: Any, name: str) -> Found | None:
        """What an attribute holds; None: code computes it, or it is a method."""
        found = self.path(path, "attribute", name)
        if isinstance(owner, ModuleType | type):
            if isinstance(owner, type):
                value = member_of(owner, name)
            else:
                value = vars(owner).get(name, MISSING)
            if value is MISSING and isinstance(owner, type):
                return self._of_class(found, owner, member_of(type(owner), name))
            if isinstance(owner, type) and is_computed(value):
                self._read_member(path, name, value)
                return None
            if isinstance(value, staticmethod | classmethod):
                value = getattr(owner, name)
            is_there = value is not MISSING and not is_library_module(value)
            return (found, value) if is_there else None
        if not is_open(owner):
            return None
        if isinstance(type(owner).__getattribute__, FunctionType):
            self._use_attributes(path, owner)
            return None
        member = member_of(type(owner), name)
        if isinstance(member, property) and member.fget is not None:
            cls = self.path(path, "attribute", "__class__")
            getter = self.path(self.path(cls, "attribute", name), "attribute", "fget")
            self.read(getter, member.fget)
            return None
        if is_data_descriptor(member):
            if is_computed(member):
                self._read_member(
                    self.path(path, "attribute", "__class__"), name, member
                )
                return None
            value = held_by(owner, member)
            return None if value is MISSING else (found, value)
        values = attributes_of(owner)
        return (
            (found, values[name])
            if name in values
            else self._of_class(found, owner, member)
        )

    def _of_class(self, path: Path, owner: Any, member: Any) -> Found | None:
        """The same for what the class of an object has, and it has not itself."""
        assert path.parent is not None
        if member is MISSING:
            if not hasattr(type(owner), "__getattr__"):
                self._note(path.parent, Check("lacks", path.key))
            return None
        if isinstance(member, FunctionType):
            if _is_users(member):  # attributes of a method are those of the function
                return path, member
            if path not in self._reads:
                self._note(path, _code_of(member))
                self._note_callable(member, path)
            return None
        if isinstance(member, staticmethod | classmethod):
            return path, getattr(owner, path.key)
        if hasattr(type(member), "__get__"):  # a jitted method, a cached property
            is_own = type(member).__module__.startswith("hopflow.")
            if is_own or is_computed(member) or isinstance(member, _CACHED):
                cls = self.path(path.parent, "attribute", "__class__")
                self._read_member(cls, path.key, member)
            return None
        return path, member

    def _read_member(self, cls: Path, name: str, member: Any) -> None:
        """Read a descriptor, and so what it reads itself where it gives a value."""
        self.read(self.path(cls, "member", name), member)

    def _use_attributes(self, path: Path, owner: Any) -> None:
        """Take note that code may read any attribute that an object holds."""
        held = attributes_of(owner)
        if type(owner).__dictoffset__:
            inner = self.path(path, "held", "__dict__")
            self.read(inner, held)
            self._use(inner, held)

    def _use_object(self, path: Path, owner: Any) -> None:
        """The same, at any depth, for code that copies objects."""
        self._use_attributes(path, owner)
        for name, part in all_attributes(owner).items():
            inner = self.path(path, "attribute", name)
            if is_plain(part) and self._known(part) is None:
                self.read(inner, part)
                self._use_object(inner, part)

    def _item(self, path: Path, owner: Any, key: Any) -> Found | None:
        """What an item holds; None: code computes it, or there is none."""
        if not isinstance(owner, dict | list | tuple | MappingProxyType):
            return None
        if isinstance(type(owner).__getitem__, FunctionType):
            return None
        if isinstance(owner, dict | MappingProxyType):
            if key in owner:
                return self.path(path, "item", key), owner[key]
            self._note(path, Check("lacks key", key))
        elif isinstance(key, int) and -len(owner) <= key < len(owner):
            return self.path(path, "item", key), owner[key]
        return None

    def _note(self, path: Path, check: Check) -> None:
        checks = self._reads.setdefault(path, [])
        if all(known.kind != check.kind for known in checks) or "lacks" in check.kind:
            checks.append(check)

    # --- uses of whole containers ---

    def _use(self, path: Path, value: Any) -> None:
        """Take note that code may read all that a container or an array has."""
        if not self._has_parts(value):
            return
        use = self._uses.get(path)
        if use is None:
            use = self._uses[path] = _Use()
            self._collect(path, value, use)
        use.count, use.is_last = use.count + 1, True

    def _collect(self, path: Path, value: Any, use: _Use) -> None:
        """All that a container has, at any depth, which is known from now on."""
        if id(value) in use.seen:
            return
        use.seen.add(id(value))
        parts = use.parts
        items: Iterable[tuple[Path, Any]] = ()
        if isinstance(value, dict | MappingProxyType):
            parts.append((path, value, Check("keys", [*value])))
            items = [(self.path(path, "item", k), x) for k, x in value.items()]
        elif isinstance(value, set | frozenset):
            parts.append((path, value, Check("members", frozenset(value))))
        elif isinstance(value, BUFFERS):
            parts.append((path, value, Check("bytes", bytes(value))))
        elif isinstance(value, np.ndarray):
            return
        elif isinstance(value, BOXES):
            content = self.path(path, "result of", content_of_box)
            items = [(content, content_of_box(value))]
        elif isinstance(value, CONTAINERS):
            parts.append((path, value, Check("length", len(value))))
            items = [(self.path(path, "item", k), x) for k, x in enumerate(value)]
        else:
            parts.append((path, value, Check("class", type(value))))
            held = attributes_of(value)
            items = [(self.path(path, "attribute", k), x) for k, x in held.items()]
        for inner, part in items:
            parts.append((inner, part, None))
            if not is_constant(part) and not is_of_trace(part):
                self._know(part, inner)
            if self._has_parts(part):
                self._collect(inner, part, use)

    def _has_parts(self, value: Any) -> bool:
        """Whether code that is given a value may read more than the value itself."""
        if isinstance(value, _WITH_PARTS):
            return True
        cls = type(value)
        if cls not in self._trees:
            self._trees[cls] = is_tree(value) or is_library_collection(value)
        return self._trees[cls]

    # --- the end ---

    def guard(
        self,
        captured: Sequence[Any],
        fixed: Sequence[Any],
        leaves: Sequence[Any],
        arguments: Sequence[str] = (),
    ) -> Guard | None:
        """What each call is checked against; None: nothing was read.

        Args:
            captured: The tensors from outside that the program is given.
            fixed: Those that must be the same objects in each call.
            leaves: Of the arguments of this call.
            arguments: How a user would write them.
        """
        self._read_bound()
        for use in list(self._uses.values()):
            for path, value, check in use.parts if use.count else ():
                self.read(path, value)
                if check is not None:
                    self._note(path, check)
        for tensor in (*captured, *fixed):
            if (known := self._known(tensor)) is not None:
                self.read(*known)
        arrays = self._arrays(captured)
        self._note_contents(Counter(path for path, _ in arrays.values()), fixed)
        pairs = [(p, c) for p, checks in self._reads.items() for c in checks]
        reads = [Read(path, check) for path, check in pairs]
        changes = self.effects.changes(arguments)
        if not changes:  # what changes it may be code that is not watched
            broken = Guard(reads, []).broken(leaves)
            changes = [f"`{read.path.text(arguments)}`" for read in broken]
        checked = {r.path for r in reads}
        wanted = [self._wanted(x, arrays, checked) for x in captured]
        return Guard(reads, wanted, changes) if reads or changes else None

    def read_among(self, values: Iterable[Any]) -> list[Any]:
        """Those of some objects that were read from outside."""
        return [x for x in values if self._known(x) is not None]

    def _read_bound(self) -> None:
        """Read what code has bound, or may have bound: it may be what it was."""
        slots = [(path, value()) for path, value in self._bound_variables.items()]
        attributes = [
            self._attribute(path, owner, step.key)
            if step.kind == "attribute"
            else self._item(path, owner, step.key)
            for (_, step), (path, owner) in self._bound.items()
        ]
        for found in filter(None, (*slots, *attributes)):
            for read in self.read(*found) if found[1] is not MISSING else ():
                self._use(*read)

    def add(self, known: Guard, leaves: Sequence[Any]) -> None:
        """Take note of what a trace has read that is used again.

        Args:
            known: The reads, of which the arguments are these leaves.
            leaves: The function that was traced, and its arguments that are no data.
        """
        key = id(known), *map(id, leaves)
        if key in self._added:
            return
        self._added[key] = known, leaves
        for leaf in leaves:
            if not is_constant(leaf) and self._known(leaf) is None:
                self.add_root(leaf, self.path(None, "constant", leaf, leaf))
        places: dict[Path, Path] = {}
        values = known.values(leaves)
        for (path, check), value in zip(known.reads, values, strict=True):
            at = self._moved(path, leaves, places)
            for found, _ in self.read(at, value):
                if check.is_of_parts:
                    self._note(found, check)

    def _moved(
        self, path: Path, leaves: Sequence[Any], places: dict[Path, Path]
    ) -> Path:
        """A path from the leaves of another trace as one from what is known here."""
        found = places.get(path)
        if found is None:
            if path.kind == "argument":
                leaf = leaves[path.key]
                known = self._known(leaf)
                found = known[0] if known else self.path(None, "constant", leaf, leaf)
            elif path.parent is None:
                found = self.path(None, path.kind, path.key, path.scope)
            else:
                parent = self._moved(path.parent, leaves, places)
                found = self.path(parent, path.kind, path.key, path.scope)
            places[path] = found
        return found

    def _arrays(self, captured: Sequence[Any]) -> dict[int, Found]:
        """The NumPy arrays that were read and are captured, by the id of the tensor."""
        read = [
            (path, value)
            for value, path in self._objects.values()
            if isinstance(value, np.ndarray) and path in self._reads
        ]
        found: dict[int, Found] = {}
        for tensor in captured:
            for path, value in read:
                if isinstance(tensor, EagerTensor) and _is_of(tensor, value):
                    found.setdefault(id(tensor), (path, value))
        return found

    def _note_contents(
        self, operands: Mapping[Path, int], fixed: Sequence[Any]
    ) -> None:
        """Have arrays compared of which something else was made than operands, and
        tensors that must be the same objects.

        Args:
            operands: How many operands are arrays from these paths.
        """
        for value, path in list(self._objects.values()):
            if path not in self._reads:
                continue
            if isinstance(value, np.ndarray):
                use = self._uses.get(path)
                count = 1 if use is None else max(use.count, 1)
                if count > operands.get(path, 0):
                    self._note(path, Check("content", value.tobytes()))
            elif any(value is x for x in fixed):
                self._note(path, identity(value))

    def _wanted(
        self, tensor: Any, arrays: Mapping[int, Found], checked: Collection[Path]
    ) -> Wanted:
        """Where calls find a tensor."""
        known = self._known(tensor)
        if known is not None and known[0] in checked:
            return Wanted(known[0], None)
        if id(tensor) in arrays and arrays[id(tensor)][0] in checked:
            return Wanted(arrays[id(tensor)][0], None, is_array=True)
        return Wanted(None, tensor)


_CACHED: Final = type(lru_cache(misses_of))
_BOUND: Final = (BuiltinFunctionType, MethodWrapperType)
_WITH_PARTS: Final = (*CONTAINERS, *BUFFERS, *BOXES, MappingProxyType, np.ndarray)


def _takes(name: Any, value: Any) -> bool:
    """Whether a method of this name takes items from an iterator."""
    is_file = isinstance(value, io.IOBase)
    return is_iterator(value) and name in (_READING if is_file else _TAKING)


def _is_taken(load: Load, value: Any) -> bool:
    """Whether code is about to take items from the value of a load: a function that is
    given a file may as well write to it."""
    is_file = isinstance(value, io.IOBase)
    takers = ("loop",) if is_file else ("loop", "call")
    return load.taker in takers and is_iterator(value)


_TAKING: Final = frozenset(("__next__", "close", "send", "throw"))
_READING: Final = frozenset(
    "__next__ read read1 readall readinto readinto1 readline readlines".split()
)


def _is_users(function: FunctionType | MethodType) -> bool:
    return not is_own_file(function.__code__.co_filename)


def _code_of(function: FunctionType | MethodType) -> Check:
    inner = function.__func__ if isinstance(function, MethodType) else function
    assert isinstance(inner, FunctionType)
    return Check("code", (inner.__code__, inner.__globals__))


def _is_of(tensor: EagerTensor, array: np.ndarray[Any, Any]) -> bool:
    """Whether a tensor has the memory of an array, all of it."""
    own = tensor.array
    return (own.ctypes.data, own.shape, own.strides, own.dtype) == (
        *(array.ctypes.data, array.shape, array.strides, array.dtype),
    )


def _copies_objects(frame: FrameType) -> bool:
    """Whether code has a name for a function of Python's library that reads all of an
    object, or for its module."""
    code = frame.f_code
    values = [frame.f_globals.get(name) for name in globals_of(code)]
    values += [frame.f_locals.get(name) for name in code.co_varnames]
    return any(
        (value.__name__ if isinstance(value, ModuleType) else value.__module__)
        in _COPYING
        for value in values
        if isinstance(value, ModuleType | FunctionType | BuiltinFunctionType)
    )


_COPYING: Final = frozenset(
    ("copy", "pickle", "_pickle", "json", "dataclasses", "marshal", "pprint")
)


def _is_scope(code: CodeType) -> bool:
    """Whether names of code are looked up in its own scope first, as in a class."""
    return not code.co_flags & inspect.CO_OPTIMIZED
