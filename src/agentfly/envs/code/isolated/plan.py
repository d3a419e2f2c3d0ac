"""Decides from the tests alone how they run, before any solution is seen. Runs in the session of the tests, after `forms`.

Tests can run isolated if all that they hand to the solution is data, and if they use no special form (`forms`). `plan_tests`
follows names, displays, comprehensions, parameters and returns to see whether a lambda, a function, a class or a module can get
there. A test that hands over such a value unseen fails.
"""

import ast
import builtins
import importlib
import symtable
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# A session runs `wire` and `forms` before this file, so `run.source` removes these lines.
from .forms import parts_of, special_form
from .wire import NotPlain, pack

ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Constant, ast.JoinedStr, ast.ListComp, ast.SetComp, ast.DictComp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ORDERING = frozenset((
    "sorted", "min", "max", "sort", "heappush", "heapify", "nlargest", "nsmallest", "insort", "insort_left", "insort_right",
    "bisect", "bisect_left", "bisect_right", "merge",
))  # fmt: skip
_CONVERSIONS = ("int", "float", "complex", "round", "divmod", "pow", "format")


@dataclass(frozen=True)
class JudgePlan:
    """`names` are asked of the solution, `modules` are imported. `cannot` is the reason why the tests cannot run isolated.

    `operators`: the tests apply operators to objects that they construct from classes of the solution. `arrays`: they use
    numpy. `seeds`: the modules whose generator of random numbers they seed.
    """

    names: frozenset[str]
    modules: frozenset[str]
    cannot: str = ""
    operators: bool = False
    arrays: bool = False
    seeds: tuple[str, ...] = ()


def asked_names(tests: list[str]) -> tuple[set[str], set[str]]:
    """Returns the global names that the tests read, and those that they set themselves."""
    reads: set[str] = set()
    sets: set[str] = set()

    def look(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                reads.add(symbol.get_name())
            if top and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                sets.add(symbol.get_name())
        for child in table.get_children():
            look(child, False)

    for test in tests:
        look(symtable.symtable(test, "<test>", "exec"), True)
    return reads, sets


def plan_tests(prelude: str, tests: list[str]) -> JudgePlan:
    """Names of modules and built-ins mean Python's own, unless the tests read no other name than those of built-ins."""
    reads, sets = asked_names(tests)
    wanted = reads - sets - asked_names([prelude])[1]
    called = {_called_name(node) for test in tests for node in ast.walk(ast.parse(test))}
    modules = {name for name in wanted - called if name in sys.stdlib_module_names or name in ALIASES}
    wanted -= modules
    names = {name for name in wanted if not hasattr(builtins, name)} or wanted
    source = _Source(prelude, tests, names, modules)
    arrays = any(path.partition(".")[0] == "numpy" for path in source.imported.values())
    paths = {source.dotted(node) for node in source.nodes if isinstance(node, ast.Name | ast.Attribute)}
    seeds = tuple(name for name in ("random", "numpy.random") if f"{name}.seed" in paths)
    return JudgePlan(frozenset(names), frozenset(modules), source.cannot(), source.uses_operators(), arrays, seeds)


class _Source:
    """What the prelude and the tests bind: by name, without scopes, so a name has all its meanings at once."""

    def __init__(self, prelude: str, tests: list[str], names: set[str], modules: set[str]) -> None:
        trees = [ast.parse(text) for text in [prelude, *tests]]
        self.nodes = [node for tree in trees for node in ast.walk(tree)]
        # What the prelude does once, it does in both sessions.
        statements = [one for one in trees[0].body if isinstance(one, ast.Expr | ast.Import | ast.ImportFrom | ast.If)]
        self.inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        self.prepares = {id(node) for one in statements for node in ast.walk(one)}
        self.names = names
        self.called = set(map(_called_name, self.nodes))
        self.imported = {name: ALIASES.get(name, name) for name in modules}  # name -> dotted path
        self.functions: dict[str, list[Any]] = defaultdict(list)
        self.classes: set[str] = set()
        self.values: dict[str, list[Any]] = defaultdict(list)  # what a name may be bound to
        self.caught: set[str] = set()  # names of exceptions, and of contexts that catch one
        self.contexts: set[str] = set()
        for node in self.nodes:
            self.bind(node)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self.bind_parameters(node, self.functions.get(_called_name(node), []))
        given = [value for node in self.nodes for value in self.handed_over(node)]
        self.handed = {value.id for value in given if isinstance(value, ast.Name)}
        self.plain_functions: set[str] = set()
        self.plain_functions = self.find_plain_functions()
        made = [value for node in self.nodes if self.constructs(node) for value in self.handed_over(node)]
        displays = [
            one for value in given for one in (self.values.get(value.id, []) if isinstance(value, ast.Name) else [value])
        ]
        refers = [*made, *(part for value in displays for part in parts_of(value))]
        self.kept = {value.id for value in refers if isinstance(value, ast.Name) and self.is_mutable(value.id)}
        methods = [node for node in self.nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        lent = (value for node in methods if self.from_solution(node.func) for value in self.handed_over(node))
        self.lent = self.kept | {value.id for value in lent if isinstance(value, ast.Name) and self.is_mutable(value.id)}

    def bind(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name].append(node)
                arguments = [*node.args.posonlyargs, *node.args.args]
                for parameter, default in zip(arguments[::-1], node.args.defaults[::-1], strict=False):
                    self.values[parameter.arg].append(default)
            case ast.ClassDef():
                self.classes.add(node.name)
            case ast.ExceptHandler(name=str(name)):
                self.caught.add(name)
            case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                self.contexts.add(name)
                self.values[name].append(value)
            case ast.Import():
                for alias in node.names:
                    self.imported[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            case ast.ImportFrom():
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            case ast.Assign():
                for target in node.targets:
                    self.assign(target, node.value)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                self.assign(node.target, node.value)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                items = node.iter.elts if isinstance(node.iter, ast.List | ast.Tuple | ast.Set) else [node.iter]
                for item in items:
                    self.assign(node.target, item)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Lambda):
                self.functions[target.id].append(value)
            self.values[target.id].append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for number, part in enumerate(target.elts):
                self.assign(part, parts[number] if len(parts) == len(target.elts) else value)

    def bind_parameters(self, call: ast.Call, functions: list[Any]) -> None:
        for function in functions:
            parameters = [*function.args.posonlyargs, *function.args.args]
            for parameter, value in zip(parameters, call.args, strict=False):
                self.values[parameter.arg].append(value)
            for keyword in call.keywords:
                self.values[keyword.arg or ""].append(keyword.value)

    # ---- what is handed to the solution ----

    def cannot(self) -> str:
        """Returns why the tests cannot run isolated, or an empty string."""
        for node in self.nodes:
            for value in self.handed_over(node):
                if what := self.not_data(value, frozenset()):
                    return f"the tests hand {what} to the solution"
            if isinstance(node, ast.ClassDef) and any(self.is_asked(base) for base in node.bases):
                return "the tests derive a class from one of the solution's"
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and any(map(self.may_be_solution, node.decorator_list)):
                return "the tests hand a function to the solution"
            if self.catches(node):
                return "the tests catch an exception of the solution"
            if id(node) not in self.prepares and (form := special_form(self, node)):
                return form
        return ""

    def handed_over(self, node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Call) and self.may_be_solution(node.func):
            if not (isinstance(node.func, ast.Attribute) and node.func.attr == "sort"):  # most likely a list's method
                yield from node.args
                yield from (keyword.value for keyword in node.keywords)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute | ast.Subscript) and self.may_be_solution(target):
                    yield node.value

    def may_be_solution(self, node: ast.expr) -> bool:
        """Whether an expression can be a function, method or attribute of the solution. The tests' own are not."""
        depth = 0
        while isinstance(node, ast.Attribute | ast.Subscript):
            node, depth = node.value, depth + 1
        if not isinstance(node, ast.Name):
            return isinstance(node, ast.Call) and self.may_be_solution(node.func)
        if node.id in self.names:
            return True
        if node.id in ("self", "cls"):
            return depth > 1  # `self.stack.push`, not `self.assertEqual`
        if node.id in self.functions or node.id in self.classes or node.id in self.imported:
            return False
        values = self.values.get(node.id)
        if values is None:
            return not hasattr(builtins, node.id)
        return not all(isinstance(value, _DISPLAYS) or self.is_own(value) for value in values)

    def is_own(self, value: ast.expr) -> bool:
        """Whether a value is made by a class or module of the tests, or by Python's own function."""
        return isinstance(value, ast.Call) and not self.may_be_solution(value.func)

    def is_asked(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.names

    def catches(self, node: ast.AST) -> bool:
        kinds: list[Any] = []
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("raises", "assertRaises")
        ):
            kinds = node.args[:1]
        return any(map(self.is_asked, kinds))

    def not_data(self, node: ast.AST | None, seen: frozenset[str]) -> str:
        """Returns "a function" or the like if the expression is not data or contains such, or an empty string."""
        match node:
            case ast.Lambda():
                return "a function"
            case ast.Name(id=name):
                return "" if name in seen else self.name_not_data(name, seen | {name})
            case ast.Attribute():
                root = _root(node)
                if isinstance(root, ast.Name) and root.id in self.classes:
                    return f"a member of the class {root.id}"
                if root is node.value and isinstance(root, ast.Name) and self.is_display(root.id):
                    return f"the method {node.attr} of a value"
                return self.evaluate(node)
            case ast.Call(func=ast.Name(id=name)) if name in self.classes:
                return "an object of a class of the tests"
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                if name in seen:
                    return ""
                values = [value for function in self.functions[name] for value in _returns(function)]
                return self.first_not_data(values, seen | {name})
            case ast.Call(func=ast.Attribute() as method) if not self.is_module(method):
                return self.not_data(method.value, seen)  # such as `functions.items()`
            case ast.Call():
                return self.evaluate(node)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.BoolOp(values=parts):
                return self.first_not_data(parts, seen)
            case ast.Dict(keys=keys, values=parts):
                return self.first_not_data([*keys, *parts], seen)
            case ast.IfExp(body=left, orelse=right) | ast.DictComp(key=left, value=right):
                return self.first_not_data([left, right], seen)
            case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part):
                return self.not_data(part, seen)
            case ast.Starred(value=part) | ast.NamedExpr(value=part) | ast.Subscript(value=part):
                return self.not_data(part, seen)
        return ""

    def first_not_data(self, nodes: list[Any], seen: frozenset[str]) -> str:
        return next(filter(None, (self.not_data(node, seen) for node in nodes)), "")

    def name_not_data(self, name: str, seen: frozenset[str]) -> str:
        if name in self.functions:
            return "a function"
        if name in self.classes:
            return "a class"
        if name in self.values:
            return self.first_not_data(self.values[name], seen)
        if name in self.imported or (name not in self.names and hasattr(builtins, name)):
            return self.evaluate(ast.Name(name, ast.Load()))
        return ""

    def is_module(self, node: ast.expr) -> bool:
        root = _root(node)
        return isinstance(root, ast.Name) and root.id in self.imported

    def evaluate(self, node: ast.expr) -> str:
        """Evaluates an expression of literals, modules and built-ins, and returns what it is if it is not data."""
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if any(name in self.values or name in self.functions or name in self.classes or name in self.names for name in used):
            return "a function" if isinstance(node, ast.Call) and _last(node.func) == "partial" else ""
        space: dict[str, Any] = {}
        try:
            for name in used & set(self.imported):
                space[name] = _find(self.imported[name])
            value = eval(compile(ast.Expression(ast.fix_missing_locations(node)), "<argument>", "eval"), space)
            pack(value)
        except NotPlain as error:
            return str(error)
        except BaseException:  # noqa: BLE001 - the test itself raises the error again
            return ""
        return ""

    # ---- what the tests do with what comes from the solution ----

    def dotted(self, node: ast.expr) -> str:
        """Returns the path of a module's member or the name of a built-in function, or an empty string."""
        if isinstance(node, ast.Attribute):
            above = self.dotted(node.value)
            return f"{above}.{node.attr}" if above else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self.imported:
            return self.imported[node.id]
        own = any(node.id in bound for bound in (self.names, self.values, self.functions, self.classes))
        return node.id if (hasattr(builtins, node.id) and not own) or node.id == "__builtins__" else ""

    def from_solution(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a value is the solution's, or is made of such a value."""
        match node:
            case ast.Name(id=name):
                values = [] if name in seen else self.values.get(name, [])
                return name in self.names or any(self.from_solution(value, seen | {name}) for value in values)
            case ast.Call(func=part) | ast.Attribute(value=part) | ast.Subscript(value=part) | ast.Starred(value=part):
                return self.from_solution(part, seen)
        return False

    def is_nested(self, name: str) -> bool:
        """Whether a name of the tests is bound to a display with another one in it."""
        inner = (part for value in self.values.get(name, []) for part in ast.walk(value) if part is not value)
        return any(isinstance(part, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp) for part in inner)

    def is_mutable(self, name: str) -> bool:
        return any(isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp) for value in self.values.get(name, []))

    def is_display(self, name: str) -> bool:
        return name in self.values and all(isinstance(value, _DISPLAYS) for value in self.values[name])

    def is_constant(self, name: ast.Name) -> bool:
        return all(isinstance(value, ast.Constant) for value in self.values.get(name.id, []))

    def is_context(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.contexts

    def is_own_name(self, node: ast.expr) -> bool:
        """Whether this is a variable of the solution's module or a function, but no class, by its capital letter."""
        if not isinstance(node, ast.Name) or node.id not in self.names - self.called:
            return False
        return node.id.isupper() or not node.id[:1].isupper()

    def is_variable(self, node: ast.expr) -> bool:
        """Whether this may be a variable that a call of the solution has bound again or changed."""
        return self.is_own_name(node) and bool(self.names & self.called)

    def uses_operators(self) -> bool:
        for node in self.nodes:
            operands: list[Any] = []
            if isinstance(node, ast.BinOp):
                operands = [node.left, node.right]
            elif isinstance(node, ast.AugAssign):
                operands = [node.target, node.value]
            elif isinstance(node, ast.Compare) and any(isinstance(op, _ORDER) for op in node.ops):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and (orders := _ORDERING.intersection((_last(node.func),))):
                operands = [] if "sort" in orders else node.args
                operands += [node.func.value] if isinstance(node.func, ast.Attribute) else []
                if any(self.holds_objects(operand, frozenset()) for operand in operands):
                    return True
            if any(self.is_object(operand) for operand in operands):
                return True
        return False

    def is_object(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether the expression constructs an object of a class of the solution, by the convention on capital letters."""
        if isinstance(node, ast.Name):
            values = [] if node.id in seen else self.values.get(node.id, [])
            return any(self.is_object(value, seen | {node.id}) for value in values)
        if isinstance(node, ast.BinOp):
            return self.is_object(node.left, seen) or self.is_object(node.right, seen)
        return self.constructs(node)

    def constructs(self, node: ast.AST) -> bool:
        name = _called_name(node)
        return name in self.names and name[:1].isupper() and "_" not in name and name not in self.plain_functions

    def find_plain_functions(self) -> set[str]:
        """Names with a capital letter that the tests use three times or more, and only to compare a call with data."""
        compared: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Compare) and sum(map(self.from_solution, [node.left, *node.comparators])) == 1:
                compared |= {id(node.left), *map(id, node.comparators)}
            elif (
                isinstance(node, ast.Call) and not self.from_solution(node.func) and self.dotted(node.func) not in _CONVERSIONS
            ):
                compared |= set(map(id, node.args))
        calls = [node for node in self.nodes if self.constructs(node)]
        names = {_called_name(node) for node in calls if id(node) not in compared}
        uses = Counter(node.id for node in self.nodes if isinstance(node, ast.Name))
        counts = Counter(map(_called_name, calls))
        return {name for name, count in counts.items() if count >= 3 and count == uses[name] and name not in names}

    def holds_objects(self, node: ast.expr, seen: frozenset[str]) -> bool:
        if isinstance(node, ast.Name) and node.id not in seen:
            return any(self.holds_objects(value, seen | {node.id}) for value in self.values.get(node.id, []))
        return any(map(self.is_object, parts_of(node)))

    def constructions(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> set[str]:
        """Returns the calls of a class of the solution that may have made this value."""
        if isinstance(node, ast.Name):
            values = [] if node.id in seen else self.values.get(node.id, [])
            return {call for value in values for call in self.constructions(value, seen | {node.id})}
        return {ast.dump(node)} if self.constructs(node) else set()


def _called_name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _last(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _root(node: ast.expr) -> Any:
    """Returns the expression at the left end of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _returns(function: Any) -> list[Any]:
    if isinstance(function, ast.Lambda):
        return [function.body]
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    return [value for value in values if value is not None]


def _find(path: str) -> Any:
    """Returns the module, or the attribute of a module, that has this dotted path."""
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
