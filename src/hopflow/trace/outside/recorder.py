"""Records what traced code reads from outside, by tracking objects.

Objects from outside are distinguished by identity from those that the code makes. They
are the function itself, its static arguments, the values of globals and of variables of
enclosing functions, and everything that is read from such objects. Each read is of an
attribute, item or variable of a tracked object, and so has an access path.
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
from hopflow.trace.outside.guard import Guard, Read, TensorSource, Values
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

Tracked: TypeAlias = tuple[Path, Any]
"""A value from outside, and the path to it."""


class _Use:
    """The use of a container or array as a whole: code may have read any part of it.

    parts     its contents at the first use, at any depth, each with a path and possibly
              a check
    seen      the ids of containers whose contents are among the parts
    count     the number of uses
    is_last   whether the last use may have passed it as an argument
    """

    __slots__ = ("count", "is_last", "parts", "seen")

    def __init__(self) -> None:
        self.parts: list[tuple[Path, Any, Check | None]] = []
        self.seen: set[int] = set()
        self.count = 0
        self.is_last = False


class Recorder:
    """The reads from outside of one trace.

    A value is checked against its state at the first read. A trace that changes the
    state outside serves no other call, so that these values need no check. A trace that
    assigns the value which is already there (`self.mode = "x"`) is valid as long as it
    is there.

    Args:
        is_of_body: Whether the trace may be reused within other traces, where its
            tensors with memory may be traced tensors.
        stops: Whether code is stopped that is about to advance an iterator.
    """

    def __init__(self, *, is_of_body: bool = False, stops: bool = True) -> None:
        self.effects = Effects(stops=stops)
        self._tensor = "operand" if is_of_body else "tensor"
        self._reads: dict[Path, list[Check]] = {}
        self._paths: dict[tuple[Any, ...], Path] = {}
        self._objects: dict[int, tuple[Any, Path]] = {}  # kept alive: ids stay unique
        self._functions: dict[int, list[tuple[FunctionType, Path]]] = {}  # by code
        self._around: dict[int, CodeType] = {}  # the enclosing code, by id
        self._uses: dict[Path, _Use] = {}
        self._callables: dict[int, Any] = {}  # by id, already noted
        self._trees: dict[type, bool] = {}  # whether classes are pytrees
        self._added: dict[tuple[int, ...], Any] = {}  # kept alive, too
        self._bound: dict[tuple[int, Step], Tracked] = {}  # assigned, by owner
        self._bound_variables: dict[Path, Callable[[], Any]] = {}  # and their values

    def path(self, parent: Path | None, kind: str, key: Any, scope: Any = None) -> Path:
        """Return the unique path for a step."""
        scope_id = scope if isinstance(scope, int) else id(scope)
        memo_key = (id(parent), kind, type(key), key, scope_id)
        path = self._paths.get(memo_key)
        if path is None:
            path = self._paths[memo_key] = Path(parent, kind, key, scope)
        return path

    # --- roots ---

    def add_root(self, value: Any, path: Path) -> None:
        """Track an object from outside that needs no check itself."""
        if is_of_trace(value) or is_constant(value):
            return
        self._reads.setdefault(path, [])
        self._track(value, path)
        self._note_callable(value, path)

    def _track(self, value: Any, path: Path) -> None:
        """Track an object from outside."""
        self._objects.setdefault(id(value), (value, path))
        self.effects.track(value, path.text)

    def _note_callable(self, value: Any, path: Path) -> None:
        """Note the functions that a call of an object may run."""
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
            attributes = attributes_of(value)
            names = [
                (self.path(path, "attribute", k), x) for k, x in attributes.items()
            ]
            self._note_parts(names)

    def _read_partial(self, value: "partial[Any]", path: Path) -> None:
        """Read the arguments of a partial; use them as wholes if the function is not
        watched."""
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

    def _note_parts(self, parts: Iterable[Tracked]) -> None:
        """Note the callables among the parts of a function or object of hopflow."""
        for path, part in parts:
            if isinstance(part, tuple):
                rows = [(self.path(path, "item", k), x) for k, x in enumerate(part)]
                self._note_parts(rows)
            elif callable(part) and not isinstance(part, type):
                self.add_root(part, path)

    # --- while code runs ---

    def resume(self, frame: FrameType) -> None:
        """Note that a generator resumes."""
        self.effects.run(frame)

    def enter(self, frame: FrameType) -> None:
        """Note that code begins to run."""
        self.effects.run(frame)
        code, values = frame.f_code, frame.f_locals
        for inner in inner_codes(code):
            self._around[id(inner)] = code
        self._note_stores(frame)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            tracked = self._tracked(values.get(name))
            use = None if tracked is None else self._uses.get(tracked[0])
            if use is not None and use.is_last:  # the caller passed it to this code
                use.count, use.is_last = use.count - 1, False
        if id(code) not in self._functions and code.co_argcount:
            self._note_method(code, values.get(names[0]))
        for function, path in self._functions.get(id(code), ()):
            self._read_defaults(function, path, values)

    def _note_stores(self, frame: FrameType) -> None:
        """Note the variables from outside that code may assign."""
        code = frame.f_code
        for name, is_global, line in stores_of(code):
            at = SourceLine(code.co_filename, line or code.co_firstlineno)
            if is_global:
                self._bind_global(frame, name, at.line)
                continue
            for function, around, place in self._closures(code, name):
                path = self.path(around, "cell", name, place)
                cell = (function.__closure__ or ())[place]
                value = self.effects.track_variable(cell, name, at)
                self._bound_variables[path] = value

    def _bind_global(self, frame: FrameType, name: str, line: int) -> None:
        """Note a global that code may assign."""
        scope = frame.f_globals
        at = SourceLine(frame.f_code.co_filename, line)
        value = self.effects.track_variable(scope, name, at)
        self._bound_variables[self.path(None, "global", name, scope)] = value

    def _note_method(self, code: CodeType, owner: Any) -> None:
        """Note a method that was not read as an attribute: Python calls it implicitly,
        like `__call__` and `__add__`, or it was read from `super()`."""
        cls = owner if isinstance(owner, type) else type(owner)
        path = self._class_of(owner)
        if path is None:
            return
        positions = dict[str, int]()  # where `super` would continue the search
        for k, base in enumerate(cls.__mro__):
            for name, member in vars(base).items():
                value = getattr(member, "__func__", member)
                if isinstance(value, FunctionType) and value.__code__ is code:
                    member_path = self.path(
                        path, "member", name, positions.get(name, 0)
                    )
                    if member is not value:
                        member_path = self.path(member_path, "attribute", "__func__")
                    self.read(member_path, value)
                    return
            positions |= dict.fromkeys(vars(base), k + 1)

    def _class_of(self, owner: Any) -> Path | None:
        """Return the path to the class of an object, or to the object if it is a class;
        None: the class is not tracked. The class is usually from outside, even if the
        code makes the object."""
        tracked = self._tracked(owner)
        is_class = isinstance(owner, type)
        if tracked is not None:
            path = tracked[0]
            return path if is_class else self.path(path, "attribute", "__class__")
        cls = owner if is_class else type(owner)
        if not is_users_class(cls):
            return None
        if self._tracked(cls) is None:
            self.add_root(cls, self.path(None, "constant", cls, cls))
        return self._objects[id(cls)][1]

    def _read_defaults(
        self, function: FunctionType, path: Path, values: Mapping[str, Any]
    ) -> None:
        """Read the defaults of a function that its parameters have, by `values`."""
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for at, (name, default) in enumerate(zip(names, defaults, strict=True)):
            if values.get(name, MISSING) is default:
                self.read(self.path(path, "default", name, at), default)
        for name, default in (function.__kwdefaults__ or {}).items():
            if values.get(name, MISSING) is default:
                self.read(self.path(path, "keyword default", name), default)

    def load(self, frame: FrameType, load: Load) -> None:
        """Record the reads of a chain of loads that is about to run."""
        self.effects.reach(frame)
        if load.kind == "super":
            self._read_inherited(frame, load.name)
            return
        if load.kind == "result" and load.binds is not None:
            for value, path in list(self._objects.values()):
                if is_users_class(value) and may_have(value, load.binds.key):
                    self.effects.track_attribute(value, load.binds.key, path.text)
            return
        if load.kind == "result":  # the owner may be any object with such an attribute
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
        for tracked in start:
            self._follow(frame, tracked, load)
        if not start and kind in ("global", "free", "local"):
            scope = frame.f_globals if kind == "global" else frame.f_locals
            self._follow_local(frame, scope.get(name, MISSING), load)

    def _of_scope(self, frame: FrameType, load: Load) -> Load:
        """Normalize a chain that begins with `sys.modules` or with the globals."""
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
        """Read an attribute of `super()` in a method, if it is no method itself."""
        code, values = frame.f_code, frame.f_locals
        owner = values.get(code.co_varnames[0]) if code.co_argcount else None
        enclosing = values.get("__class__")
        cls = owner if isinstance(owner, type) else type(owner)
        path = self._class_of(owner)
        if path is None or enclosing not in cls.__mro__:
            return
        start = cls.__mro__.index(enclosing) + 1
        value = member_of(cls, name, start)
        path = self.path(path, "member", name, start)
        if isinstance(value, staticmethod):
            self.read(self.path(path, "attribute", "__func__"), value.__func__)
        elif value is not MISSING and not hasattr(type(value), "__get__"):
            for tracked in self.read(path, value):
                self._use(*tracked)

    def _imported(self, frame: FrameType, name: str) -> list[Tracked]:
        """Read a module that code has imported, if it is a user's."""
        try:
            name = resolve_name(name, frame.f_globals.get("__package__"))
        except ImportError:
            return []
        return self._module(sys.modules.get(name), name)

    def _module(self, value: Any, name: str) -> list[Tracked]:
        """Read a module by its name, unless it is a library's."""
        if not isinstance(value, ModuleType) or is_library_module(value):
            return []
        if sys.modules.get(name) is not value:
            return []
        return self.read(self.path(None, "global", name, sys.modules), value)

    def give(self, tensor: Value) -> None:
        """Note that Python code reads the elements of a tensor: they are checked, if it
        is from outside."""
        tracked = self._tracked(tensor)
        if tracked is not None:
            for path, value in self.read(*tracked):
                self._note(path, Check("elements", elements(value)))

    def _variable(self, frame: FrameType, kind: str, name: str) -> list[Tracked]:
        """Read the value of a variable, if it is from outside."""
        code = frame.f_code
        is_local = kind != "global" or (name in frame.f_locals and _is_scope(code))
        scope = frame.f_locals if is_local else frame.f_globals
        value = scope.get(name, MISSING)
        if value is MISSING or is_library_module(value):
            return []
        if self._tracked(value) is None and self.effects.was_assigned(value):
            return []
        if not is_local:
            if is_library(frame.f_globals.get("__name__")):
                return []  # code of `hopflow.nn`, watched for the user's modules
            return self.read(self.path(None, "global", name, frame.f_globals), value)
        paths = self.cells(code, name, value) if kind == "free" else []
        if paths:
            return [read for path in paths for read in self.read(path, value)]
        tracked = self._tracked(value)
        if tracked is None and isinstance(value, ModuleType):  # it was imported here
            return self._module(value, value.__name__)
        return [] if tracked is None else self.read(*tracked)

    def cells(self, code: CodeType, name: str, value: Any) -> list[Path]:
        """Return the paths to a free variable of code.

        A function that is defined in the trace shares the variable with the function
        around it.
        """
        return [
            self.path(path, "cell", name, at)
            for function, path, at in self._closures(code, name)
            if content_of(function, at) is value
        ]

    def _closures(
        self, code: CodeType, name: str
    ) -> Iterator[tuple[FunctionType, Path, int]]:
        """Yield the functions that may share a free variable with code, each with its
        path and the position of the variable."""
        enclosing: CodeType | None = code
        while enclosing is not None and name in enclosing.co_freevars:
            if functions := self._functions.get(id(enclosing)):
                at = enclosing.co_freevars.index(name)
                for function, path in functions:
                    yield function, path, at
                return
            enclosing = self._around.get(id(enclosing))

    def _tracked(self, value: Any) -> Tracked | None:
        """Return a tracked object with its path; None: it is not tracked."""
        entry = self._objects.get(id(value))
        return None if entry is None else (entry[1], entry[0])

    def tracked_path(self, value: Any) -> Path | None:
        """Return the path of a tracked object; None: it is not tracked."""
        tracked = self._tracked(value)
        return None if tracked is None else tracked[0]

    def _follow(self, frame: FrameType, start: Tracked, load: Load) -> None:
        """Read the values along a chain that starts at a tracked object."""
        path, value = start
        for step in load.steps:
            step = self._resolved(frame, step)
            owner, part = (path, value), None
            is_module = isinstance(value, ModuleType)
            if is_module and step == Step("attribute", "__dict__"):
                continue  # its items are the attributes
            if step.kind == "attribute" or (step.kind == "item" and is_module):
                part = self._attribute(path, value, step.key)
            elif step.kind == "item":
                part = self._item(path, value, step.key)
            elif step.kind in ("attribute of", "any attribute") and is_open(value):
                self._use_attributes(path, value)
            if load.kind != "result" and _takes(step.key, value):
                self.effects.stop(value)
            if part is not None and self.effects.has_put(value, step.key, part[1]):
                return
            reads = [] if part is None else self.read(*part)
            if not reads:
                if part is None and load.kind != "result":
                    self._use(*owner)
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
        """Note an attribute or item that code is about to assign, and may read before;
        return False if it is unknown."""
        if step.kind == "attribute":
            self.effects.track_attribute(owner, step.key, path.text)
        elif step.kind != "item" or type(owner) not in (dict, list):
            return False
        else:
            item = self._item(path, owner, step.key)
            for tracked in [] if item is None else self.read(*item):
                self._use(*tracked)
        self._bound[id(owner), step] = path, owner
        return True

    def _follow_local(self, frame: FrameType, value: Any, load: Load) -> None:
        """Read the values along a chain that starts at an object which the code made:
        it may hold objects from outside, and its class usually is from outside."""
        for n, step in enumerate(load.steps):
            rest = load._replace(steps=load.steps[n:])
            if (tracked := self._tracked(value)) is not None:
                self._follow(frame, tracked, rest)
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
            attributes = all_attributes(value)
            if step.key in attributes:
                value = attributes[step.key]
                continue
            if (path := self._class_of(value)) is not None:
                if step.key == "__class__":
                    rest = load._replace(steps=load.steps[n + 1 :])
                self._follow(frame, (path, type(value)), rest)
            return
        if load.steps and (tracked := self._tracked(value)) is not None:
            self._follow(frame, tracked, load._replace(steps=()))

    def _resolved(self, frame: FrameType, step: Step) -> Step:
        """Return a step with the value of the variable that is its key."""
        if step.kind not in ("item of", "attribute of"):
            return step
        kind, name = step.key
        scope = frame.f_globals if kind == "global" else frame.f_locals
        key = scope.get(name, MISSING)
        return Step(step.kind.partition(" ")[0], key) if is_key(key) else step

    # --- reads ---

    def read(self, path: Path, value: Any) -> list[Tracked]:
        """Record a read of a value at a path.

        Returns:
            The value with the path by which it is tracked; nothing, if it belongs to a
            trace.
        """
        if is_of_trace(value):
            return []
        tracked = self._tracked(value)
        if tracked is not None and tracked[0] is not path and has_identity(value):
            self.read(*tracked)
            if path not in self._reads:
                self._reads[path] = [Check("alias", tracked[0])]
            return [tracked]
        if path not in self._reads:
            self._reads[path] = []
            self._reads[path] += self._checks(path, value)
        if not is_constant(value):
            self._track(value, path)
        return [(path, value)]

    def _checks(self, path: Path, value: Any) -> Iterator[Check]:
        """Yield the checks of a value that is read."""
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

    def _attribute(self, path: Path, owner: Any, name: str) -> Tracked | None:
        """Return a stored attribute with its path; None: it is computed or a method."""
        inner = self.path(path, "attribute", name)
        if isinstance(owner, ModuleType | type):
            if isinstance(owner, type):
                value = member_of(owner, name)
            else:
                value = vars(owner).get(name, MISSING)
            if value is MISSING and isinstance(owner, type):
                return self._of_class(inner, owner, member_of(type(owner), name))
            if isinstance(owner, type) and is_computed(value):
                self._read_member(path, name, value)
                return None
            if isinstance(value, staticmethod | classmethod):
                value = getattr(owner, name)
            is_tracked = value is not MISSING and not is_library_module(value)
            return (inner, value) if is_tracked else None
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
            return None if value is MISSING else (inner, value)
        values = attributes_of(owner)
        return (
            (inner, values[name])
            if name in values
            else self._of_class(inner, owner, member)
        )

    def _of_class(self, path: Path, owner: Any, member: Any) -> Tracked | None:
        """Return an attribute that an object inherits from its class; see
        `_attribute`."""
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
        """Read a descriptor, whose code may read more."""
        self.read(self.path(cls, "member", name), member)

    def _use_attributes(self, path: Path, owner: Any) -> None:
        """Note that code may read any attribute of an object."""
        attributes = attributes_of(owner)
        if type(owner).__dictoffset__:
            inner = self.path(path, "held", "__dict__")
            self.read(inner, attributes)
            self._use(inner, attributes)

    def _use_object(self, path: Path, owner: Any) -> None:
        """Note that code may read attributes of an object at any depth."""
        self._use_attributes(path, owner)
        for name, part in all_attributes(owner).items():
            inner = self.path(path, "attribute", name)
            if is_plain(part) and self._tracked(part) is None:
                self.read(inner, part)
                self._use_object(inner, part)

    def _item(self, path: Path, owner: Any, key: Any) -> Tracked | None:
        """Return an item with its path; None: it is computed or missing."""
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
        """Add a check at a path, unless there is one of its kind."""
        checks = self._reads.setdefault(path, [])
        if all(other.kind != check.kind for other in checks) or "lacks" in check.kind:
            checks.append(check)

    # --- uses of whole containers ---

    def _use(self, path: Path, value: Any) -> None:
        """Note that code may read all contents of a container or array."""
        if not self._has_parts(value):
            return
        use = self._uses.get(path)
        if use is None:
            use = self._uses[path] = _Use()
            self._collect(path, value, use)
        use.count, use.is_last = use.count + 1, True

    def _collect(self, path: Path, value: Any, use: _Use) -> None:
        """Track the contents of a container at any depth, as parts of a use."""
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
            attributes = attributes_of(value)
            items = [
                (self.path(path, "attribute", k), x) for k, x in attributes.items()
            ]
        for inner, part in items:
            parts.append((inner, part, None))
            if not is_constant(part) and not is_of_trace(part):
                self._track(part, inner)
            if self._has_parts(part):
                self._collect(inner, part, use)

    def _has_parts(self, value: Any) -> bool:
        """Whether code that gets a value may read contents of it."""
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
        """Return the guard on the reads of the trace; None: there are none.

        Args:
            captured: The tensors from outside that the program gets.
            fixed: The tensors that must be the same objects in each call.
            leaves: The leaves of the arguments of this call.
            arguments: The user's expressions for the leaves.
        """
        self._read_bound()
        for use in list(self._uses.values()):
            for path, value, check in use.parts if use.count else ():
                self.read(path, value)
                if check is not None:
                    self._note(path, check)
        for tensor in (*captured, *fixed):
            if (tracked := self._tracked(tensor)) is not None:
                self.read(*tracked)
        arrays = self._arrays(captured)
        self._note_contents(Counter(path for path, _ in arrays.values()), fixed)
        pairs = [(p, c) for p, checks in self._reads.items() for c in checks]
        reads = [Read(path, check) for path, check in pairs]
        changes = self.effects.changes(arguments)
        if not changes:  # unwatched code may have changed something
            broken = Guard(reads, []).broken(leaves)
            changes = [f"`{read.path.text(arguments)}`" for read in broken]
        checked = {r.path for r in reads}
        sources = [self._source(x, arrays, checked) for x in captured]
        return Guard(reads, sources, changes) if reads or changes else None

    def read_among(self, values: Iterable[Any]) -> list[Any]:
        """Return those of some objects that were read from outside."""
        return [x for x in values if self._tracked(x) is not None]

    def _read_bound(self) -> None:
        """Read what code may have assigned: the value may be the old one."""
        variables = [(path, value()) for path, value in self._bound_variables.items()]
        attributes = [
            self._attribute(path, owner, step.key)
            if step.kind == "attribute"
            else self._item(path, owner, step.key)
            for (_, step), (path, owner) in self._bound.items()
        ]
        for slot in filter(None, (*variables, *attributes)):
            for tracked in self.read(*slot) if slot[1] is not MISSING else ():
                self._use(*tracked)

    def add(self, guard: Guard, leaves: Sequence[Any]) -> None:
        """Record the reads of another trace that is reused in this one.

        Args:
            guard: The guard of that trace.
            leaves: Its arguments: the traced function, and static arguments.
        """
        key = id(guard), *map(id, leaves)
        if key in self._added:
            return
        self._added[key] = guard, leaves
        for leaf in leaves:
            is_known = is_constant(leaf) or self._tracked(leaf) is not None
            if not (is_known or self.is_made_here(leaf)):
                self.add_root(leaf, self.path(None, "constant", leaf, leaf))
        values = guard.values(leaves)
        moved = _MovedPaths(self, leaves)
        for (path, check), value in zip(guard.reads, values, strict=True):
            for own in moved.of(path, value):
                for target, _ in self.read(own, value):
                    if check.is_of_parts:
                        self._note(target, check)

    def is_made_here(self, value: Any) -> bool:
        """Whether code that has run in the trace has defined a function."""
        while isinstance(value, MethodType | partial):
            value = value.__func__ if isinstance(value, MethodType) else value.func
        return isinstance(value, FunctionType) and id(value.__code__) in self._around

    def _arrays(self, captured: Sequence[Any]) -> dict[int, Tracked]:
        """Return the NumPy arrays that were read and captured, by id of the tensor."""
        reads = [
            (path, value)
            for value, path in self._objects.values()
            if isinstance(value, np.ndarray) and path in self._reads
        ]
        arrays: dict[int, Tracked] = {}
        for tensor in captured:
            for path, value in reads:
                if isinstance(tensor, EagerTensor) and _is_of(tensor, value):
                    arrays.setdefault(id(tensor), (path, value))
        return arrays

    def _note_contents(
        self, operands: Mapping[Path, int], fixed: Sequence[Any]
    ) -> None:
        """Add checks of the elements of arrays that were used other than as operands,
        and of the identity of fixed tensors.

        Args:
            operands: Path of an array -> how many operands it is.
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

    def _source(
        self, tensor: Any, arrays: Mapping[int, Tracked], checked: Collection[Path]
    ) -> TensorSource:
        """Return the source of a captured tensor in calls."""
        tracked = self._tracked(tensor)
        if tracked is not None and tracked[0] in checked:
            return TensorSource(tracked[0], None)
        if id(tensor) in arrays and arrays[id(tensor)][0] in checked:
            return TensorSource(arrays[id(tensor)][0], None, is_array=True)
        return TensorSource(None, tensor)


_CACHED: Final = type(lru_cache(misses_of))
_BOUND: Final = (BuiltinFunctionType, MethodWrapperType)
_WITH_PARTS: Final = (*CONTAINERS, *BUFFERS, *BOXES, MappingProxyType, np.ndarray)


def _takes(name: Any, value: Any) -> bool:
    """Whether a method of this name takes items from an iterator."""
    is_file = isinstance(value, io.IOBase)
    return is_iterator(value) and name in (_READING if is_file else _TAKING)


def _is_taken(load: Load, value: Any) -> bool:
    """Whether code is about to take items from the value of a load. A call with a file
    as an argument does not count, as it may also write."""
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
    """Whether a tensor has exactly the memory of an array."""
    memory = tensor.array
    return (memory.ctypes.data, memory.shape, memory.strides, memory.dtype) == (
        *(array.ctypes.data, array.shape, array.strides, array.dtype),
    )


def _copies_objects(frame: FrameType) -> bool:
    """Whether code refers to a standard module that reads whole objects, such as
    `copy`, or to a function of one."""
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
    """Whether code looks names up in its local scope first, like a class body."""
    return not code.co_flags & inspect.CO_OPTIMIZED


class _MovedPaths:
    """The paths of another trace, which is reused in the one of a recorder, as paths of
    that one.

    Args:
        leaves: The arguments of the other trace.
    """

    def __init__(self, recorder: Recorder, leaves: Sequence[Any]) -> None:
        self._recorder, self._leaves = recorder, leaves
        self._memo: dict[Path, list[Path]] = {}
        self._values = Values(leaves)

    def of(self, path: Path, value: Any) -> list[Path]:
        """Return the paths to a value; none, if it belongs to the trace."""
        if path not in self._memo:
            self._memo[path] = self._moved(path, value)
        return self._memo[path]

    def _moved(self, path: Path, value: Any) -> list[Path]:
        recorder, parent = self._recorder, path.parent
        if parent is None and path.kind != "argument":
            return [recorder.path(None, path.kind, path.key, path.scope)]
        tracked = recorder.tracked_path(value)
        if parent is None:
            if tracked is not None or recorder.is_made_here(value):
                return [] if tracked is None else [tracked]
            return [recorder.path(None, "constant", value, value)]
        owner = self._values[parent]
        if recorder.tracked_path(owner) is None and recorder.is_made_here(owner):
            shared = []
            if path.kind == "cell" and isinstance(owner, FunctionType):
                shared = recorder.cells(owner.__code__, path.key, value)
            return shared or ([] if tracked is None else [tracked])
        around = self.of(parent, owner)
        if not around:
            return [] if tracked is None else [tracked]
        return [recorder.path(p, path.kind, path.key, path.scope) for p in around]
