"""Forms of tests that need the solution in their own process, by their text. Runs in the session of the tests, after `wire`.

runs text    `eval` and the like would run text of the solution where its tests are counted
one process  standard streams, environment, files, patches, threads: what two processes do not share
one object   identity, context managers, operators and conversions that `judge.RemoteObject` has not
"""

import ast
import builtins
from typing import Any

RUNS_TEXT = frozenset((
    "__builtins__", "__import__", "_ctypes", "_pickle", "asteval", "bdb", "breakpoint", "builtins", "cffi", "cloudpickle",
    "code", "codeop", "compile", "cPickle", "cProfile", "ctypes", "dill", "distutils", "doctest", "eval", "exec", "gettext",
    "imp", "importlib", "inspect", "IPython", "jinja2", "joblib", "js2py", "jsonpickle", "lib2to3", "logging.config",
    "mailcap", "mako", "marshal", "numexpr", "numpy.distutils", "numpy.f2py", "numpy.lib", "numpy.load", "numpy.loads",
    "numpy.testing.rundocs", "numpy.testing.runstring", "operator.methodcaller", "pdb", "pickle", "pickletools", "pkgutil",
    "profile", "pstats", "pty", "pydoc", "rlcompleter", "ruamel", "runpy", "setuptools", "shelve", "simpleeval", "site",
    "subprocess", "sympy", "sys._getframe", "sys.modules", "sys.setprofile", "sys.settrace", "timeit", "tkinter", "trace",
    "turtle", "types.CodeType", "types.FunctionType", "types.LambdaType", "typing.ForwardRef", "typing.get_type_hints",
    "unittest.defaultTestLoader", "unittest.TestLoader", "webbrowser", "yaml", "zipimport",
))  # fmt: skip
"""Names and dotted paths, each with all below it."""
ONE_PROCESS = frozenset((
    "_thread", "anyio", "asyncio", "atexit", "bs4", "bz2.open", "codecs.open", "concurrent", "contextlib.chdir",
    "contextlib.ExitStack", "contextlib.redirect_stderr", "contextlib.redirect_stdout", "contextvars",
    "csv.field_size_limit", "cv2", "dbm", "decimal.getcontext", "decimal.localcontext", "decimal.setcontext", "dir",
    "django", "faker", "fastapi", "faulthandler", "fcntl", "fileinput", "flask", "freezegun", "gc", "getpass", "glob",
    "globals", "gzip.open", "http", "input", "io.FileIO", "io.open", "jax", "keras", "locale", "locals", "logging", "lxml",
    "lzma.open", "matplotlib", "memoryview", "mmap", "mock", "multiprocessing", "networkx", "numpy.datetime64",
    "numpy.errstate", "numpy.genfromtxt", "numpy.loadtxt", "numpy.ma", "numpy.matrix", "numpy.may_share_memory",
    "numpy.memmap", "numpy.poly1d", "numpy.printoptions", "numpy.random.get_state", "numpy.random.set_state",
    "numpy.recarray", "numpy.save", "numpy.savetxt", "numpy.savez", "numpy.set_printoptions", "numpy.seterr",
    "numpy.shares_memory", "numpy.timedelta64", "open", "os", "pandas", "pathlib", "PIL", "plotly",
    "polars", "pytest.deprecated_call", "pytest.MonkeyPatch", "pytest.warns", "queue.Queue", "random.getstate",
    "random.setstate", "requests", "resource", "responses", "scipy.sparse", "seaborn", "select", "selectors", "shutil",
    "signal", "sklearn", "socket", "socketserver", "sqlite3", "sys.__stdout__", "sys.argv", "sys.displayhook",
    "sys.exc_info", "sys.excepthook", "sys.getrefcount", "sys.path", "sys.setrecursionlimit", "sys.stderr", "sys.stdin",
    "sys.stdout", "tarfile", "tempfile", "tensorflow", "threading", "time.sleep", "time.tzset", "torch", "tracemalloc",
    "trio", "types.AsyncGeneratorType", "types.CoroutineType", "types.GeneratorType", "types.MappingProxyType",
    "types.MethodType", "types.SimpleNamespace", "unittest.IsolatedAsyncioTestCase", "unittest.mock", "urllib.request",
    "vars", "warnings.catch_warnings", "weakref", "xml", "zipfile",
))  # fmt: skip
_HARMLESS = ("os.path.join", "os.path.basename", "os.path.dirname", "os.path.splitext", "os.sep", "os.linesep", "os.path.sep")
_METHODS = frozenset(("assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex", "send", "throw"))
_CHANGES = frozenset((
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove", "reverse",
    "setdefault", "sort", "update",
))  # fmt: skip
READABLE = ("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__")
_TAKES_OBJECTS = frozenset((
    "abs", "all", "any", "bisect", "bool", "callable", "collections", "dict", "enumerate", "filter", "frozenset", "getattr",
    "hasattr", "hash", "heapq", "id", "isinstance", "issubclass", "iter", "itertools", "len", "list", "map", "max", "min",
    "numpy.testing", "print", "pytest", "repr", "set", "setattr", "sorted", "str", "tuple", "unittest", "zip",
))  # fmt: skip
"""Functions of Python that a stand-in of an object serves as the object would."""
_CROSSING = ("collections.", "datetime.", "decimal.", "fractions.", "numbers.", "numpy.", "typing.", "uuid.")
_READS = frozenset((
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "int", "len", "list", "max", "min", "next", "round",
    "set", "sorted", "str", "sum", "tuple", "zip",
))  # fmt: skip
_ASSERTS: dict[str, Any] = {
    "assertEqual": ast.Eq, "assertNotEqual": ast.NotEq, "assertIs": ast.Is, "assertIsNot": ast.IsNot, "assertIn": ast.In,
    "assertNotIn": ast.NotIn, "assertLess": ast.Lt, "assertLessEqual": ast.LtE, "assertGreater": ast.Gt,
    "assertGreaterEqual": ast.GtE, "assertAlmostEqual": ast.Lt,
}  # fmt: skip
_DATA = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.JoinedStr, ast.ListComp, ast.SetComp, ast.DictComp, ast.UnaryOp)
ERRORS = {
    error.__name__: error
    for error in (
        ArithmeticError, AssertionError, AttributeError, BrokenPipeError, BufferError, ChildProcessError, ConnectionError,
        DeprecationWarning, EOFError, Exception, FileExistsError, FileNotFoundError, FloatingPointError, FutureWarning,
        ImportError, IndentationError, IndexError, InterruptedError, IsADirectoryError, KeyError, LookupError, MemoryError,
        ModuleNotFoundError, NameError, NotADirectoryError, NotImplementedError, OSError, OverflowError, PermissionError,
        ProcessLookupError, RecursionError, ReferenceError, RuntimeError, RuntimeWarning, SyntaxError, SystemError, TabError,
        TimeoutError, TypeError, UnboundLocalError, UnicodeError, UserWarning, ValueError, Warning, ZeroDivisionError,
    )
}  # fmt: skip
"""What a solution can raise in a test by its own name. Not StopIteration: it would end a `map` of the tests early."""


def special_form(source: Any, node: ast.AST) -> str:
    """Returns why this part of the tests needs the solution in its process, or an empty string. `source`: `plan._Source`."""
    if any(source.is_variable(value) for value in _values_read(source, node)):
        return "the tests read a variable of the solution, which its functions may change"
    match node:
        case ast.Name() | ast.Attribute():
            return _named_form(source, node)
        case ast.ImportFrom(module=str(path), names=[ast.alias(name="*")]):
            return _path_form(path)
        case ast.FunctionDef(name="input" | "print" | "open"):
            return "the tests replace a built-in function"
        case ast.With(items=items) | ast.AsyncWith(items=items):
            if any(source.from_solution(item.context_expr) for item in items):
                return "the tests use an object of the solution as a context manager"
        case ast.Assign(targets=[ast.Name()], value=ast.Subscript(value=ast.Name(id=name), slice=part)):
            if not isinstance(part, ast.Slice) and name in source.handed and source.is_nested(name):
                return "the tests keep a part of an argument"
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=value) if form := _changed(source, value):
            return form
        case ast.MatchClass(cls=kind) if source.from_solution(kind):
            return "the tests match an object of the solution"
        case ast.Compare():
            operands = [node.left, *node.comparators]
            reasons = (_compared(source, *pair) for pair in zip(operands, node.ops, operands[1:], strict=False))
            return next(filter(None, reasons), "")
        case ast.BinOp(left=left, right=right) if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
            return _mixed(source, left, right)
        case ast.AugAssign(target=left, value=right):
            return _mixed(source, left, right)
        case ast.FormattedValue(value=value, format_spec=ast.JoinedStr()) if source.is_object(value):
            return "the tests format an object of the solution"
        case ast.Delete(targets=targets):
            if any(isinstance(target, ast.Attribute) and source.from_solution(target.value) for target in targets):
                return "the tests delete an attribute of the solution"
        case ast.ExceptHandler(type=kind) if kind is not None:
            kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
            return next(filter(None, (_caught(source, one) for one in kinds)), "")
        case ast.Call():
            return _called(source, node)
    return ""


def _path_form(path: str) -> str:
    parts = [] if path.startswith(_HARMLESS) else path.split(".")
    above = {".".join(parts[: end + 1]) for end in range(len(parts))}
    if above & RUNS_TEXT:
        return f"the tests use {path}, which can run text that the solution returns"
    return f"the tests use {path}, which acts on the process that they run in" if above & ONE_PROCESS else ""


def _named_form(source: Any, node: ast.Name | ast.Attribute) -> str:
    path = source.dotted(node)
    if id(node) not in source.inner and (form := _path_form(path)):
        return form
    if isinstance(node, ast.Name):
        replaced = isinstance(node.ctx, ast.Store) and node.id in ("input", "print", "open")
        return "the tests replace a built-in function" if replaced else ""
    if isinstance(node.ctx, ast.Store) and path:
        return f"the tests set {path}"
    if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Call) and source.dotted(node.value.func):
        return "the tests set an attribute of a module's object"
    if isinstance(node.value, ast.Name) and node.value.id in source.caught and node.attr not in ("add_note", "with_traceback"):
        return "the tests read an attribute of an exception"
    if (
        isinstance(node.value, ast.Attribute)
        and node.value.attr in ("exception", "value")
        and source.is_context(node.value.value)
    ):
        return "the tests read an attribute of an exception"
    if node.attr in _METHODS and (node.attr not in ("send", "throw") or source.from_solution(node.value)):
        return f"the tests use {node.attr}"
    hidden = node.attr.startswith("__") and node.attr.endswith("__") and node.attr not in READABLE
    return f"the tests read {node.attr} of the solution" if hidden and source.from_solution(node.value) else ""


def _compared(source: Any, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
    if isinstance(op, ast.Is | ast.IsNot):
        for one, other in ((left, right), (right, left)):
            own = isinstance(other, ast.Name) and other.id in source.values and not source.from_solution(other)
            if own and source.from_solution(one) and not source.is_constant(other):
                return "the tests ask whether a result is the same object as an argument"
        return ""
    if isinstance(op, ast.In | ast.NotIn):
        return "the tests look for data in an object of the solution" if source.is_object(right) else ""
    if any(isinstance(one, ast.Name) and one.id in source.kept for one in (left, right)):
        return "the tests compare an argument that an object or a list refers to"
    for one, other in ((left, right), (right, left)):
        if source.from_solution(one) and isinstance(other, ast.Call) and (what := source.not_data(other, frozenset())):
            return f"the tests compare a result with {what}"
    made = [source.constructions(one) for one in (left, right)]
    if isinstance(op, ast.Eq) and all(made) and not made[0] & made[1]:
        return "the tests compare objects that are constructed differently"
    return _mixed(source, left, right)


def _mixed(source: Any, left: ast.expr, right: ast.expr) -> str:
    """Reads an operation between an object of the solution and data."""
    for one, other in ((left, right), (right, left)):
        if source.is_object(one) and is_data(source, other, frozenset()):
            return "the tests apply an operator to an object of the solution and data"
    return ""


def is_data(source: Any, node: ast.expr, seen: frozenset[str]) -> bool:
    """Whether the tests make this value themselves. None is not counted: nothing is equal to it."""
    if isinstance(node, ast.Constant):
        return node.value is not None
    if isinstance(node, ast.Name):
        values = [] if node.id in seen else source.values.get(node.id, [])
        return any(is_data(source, value, seen | {node.id}) for value in values)
    if isinstance(node, ast.UnaryOp) and source.is_object(node.operand):
        return False
    if isinstance(node, ast.BinOp):
        return all(is_data(source, part, seen) for part in (node.left, node.right))
    return isinstance(node, _DATA) or (isinstance(node, ast.Call) and bool(source.dotted(node.func)))


def _called(source: Any, node: ast.Call) -> str:
    path = source.dotted(node.func)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method in _ASSERTS and len(node.args) > 1:
        return _compared(source, node.args[0], _ASSERTS[method](), node.args[1])
    if method in ("raises", "assertRaises", "assertRaisesRegex") and node.args:
        kinds = node.args[0].elts if isinstance(node.args[0], ast.Tuple) else node.args[:1]
        return next(filter(None, (_caught(source, kind) for kind in kinds)), "")
    name = node.args[1] if path in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1 else None
    if name is not None and source.from_solution(name):
        return "the solution names an attribute that the tests use"
    if isinstance(name, ast.Constant) and (form := _path_form(f"{source.dotted(node.args[0])}.{name.value!s}")):
        return form
    if isinstance(name, ast.Constant) and str(name.value).startswith("__") and name.value not in READABLE:
        return f"the tests ask for {name.value!s}"
    if path == "type" and any(isinstance(one, ast.Name) and one.id in source.caught for one in node.args):
        return "the tests ask for the class of an exception"
    if (path in ("isinstance", "issubclass") and len(node.args) == 2) or method in ("assertIsInstance", "assertNotIsInstance"):
        thing, kind = node.args[:2]
        whole = path == "issubclass" or not _crosses(source.dotted(kind))
        if (source.is_object(thing) or (whole and source.from_solution(thing))) and not source.from_solution(kind):
            return "the tests ask whether an object of the solution is of another class"
        return ""
    if method in _CHANGES and (form := _changed(source, node.func.value)):  # type: ignore[attr-defined]
        return form
    if path and path.partition(".")[0] not in _TAKES_OBJECTS and not path.startswith("numpy.testing"):
        for argument in node.args:
            if source.is_object(argument) or source.holds_objects(argument, frozenset()):
                return f"the tests hand an object of the solution to {path}"
    return ""


def _crosses(path: str) -> bool:
    """Whether data of this class arrives as such, or the tests' text does not say which class it is."""
    return "." not in path or path.startswith(_CROSSING)


def _changed(source: Any, node: ast.expr) -> str:
    """Reads a change in place of what the solution may hold: an attribute, a variable of its module, an argument."""
    if isinstance(node, ast.Name) and node.id in source.lent:
        return "the tests change an argument that an object or a list may refer to"
    attribute = isinstance(node, ast.Attribute) and source.from_solution(node.value)
    return "the tests change an attribute of the solution in place" if attribute or source.is_own_name(node) else ""


def _values_read(source: Any, node: ast.AST) -> list[ast.expr]:
    """Returns the parts of which a value is used, not called or handed on as a function may be."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.BoolOp(values=values):
            return values
        case ast.UnaryOp(operand=value) | ast.Subscript(value=value) | ast.FormattedValue(value=value):
            return [value]
        case ast.Assert(test=value) | ast.If(test=value) | ast.For(iter=value) | ast.comprehension(iter=value):
            return [value]
        case ast.Attribute(value=value, attr=name) if name not in READABLE:
            return [value]
        case ast.Call(args=values) if source.dotted(node.func) in _READS or getattr(node.func, "attr", "") in _ASSERTS:
            return values
    return []


def parts_of(node: ast.expr) -> list[ast.expr]:
    """Returns the items of a display, or the item of a comprehension."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return node.elts
    if isinstance(node, ast.Dict):
        return [part for part in [*node.keys, *node.values] if part is not None]
    return [node.elt] if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp) else []


def _caught(source: Any, kind: ast.expr) -> str:
    """Exceptions arrive by their built-in names, so one of a module is not what the tests expect."""
    path = source.dotted(kind)
    by_name = path in ERRORS or path in ("", "BaseException", "StopIteration", "GeneratorExit")
    return "" if by_name or not (hasattr(builtins, path) or "." in path) else f"the tests catch {path}"
