"""The control of a test file: the same tests with wrong expectations, in which each test of a right solution must fail.

Code that makes every test pass, by patching the runner or by objects that equal everything, makes the control pass too. What a
value must equal is changed; other comparisons are turned round; a `raises` waits for an exception that nothing raises.
"""

from __future__ import annotations

import ast
import random
import secrets

from ...errors import DataError

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
PAIRS = (
    ("assertEqual", "assertNotEqual"), ("assertTrue", "assertFalse"), ("assertIn", "assertNotIn"), ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"), ("assertGreater", "assertLessEqual"), ("assertLess", "assertGreaterEqual"),
    ("assertAlmostEqual", "assertNotAlmostEqual"), ("assertRegex", "assertNotRegex"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertListEqual", "assertNotEqual"), ("assertDictEqual", "assertNotEqual"), ("assertTupleEqual", "assertNotEqual"),
    ("assertSetEqual", "assertNotEqual"), ("assertCountEqual", "assertNotEqual"), ("assertSequenceEqual", "assertNotEqual"),
    ("assertMultiLineEqual", "assertNotEqual"),
)  # fmt: skip
OPPOSITE = {**{right: left for left, right in reversed(PAIRS)}, **dict(PAIRS)}
NEVER = "_Never"
HELPERS = f"""
{NEVER} = type({NEVER!r}, (Exception,), {{}})
def _other(value):
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float, complex):
        return value + OFFSET * (abs(value) + 1)
    if kind is str:
        return value + "x"
    if kind is bytes:
        return value + b"x"
    if kind in (list, tuple):
        return kind([*value[:-1], _other(value[-1])]) if value else kind([OFFSET])
    if kind is dict:
        return {{**value, **{{key: _other(value[key]) for key in list(value)[-1:]}}}} if value else {{OFFSET: OFFSET}}
    return OFFSET if value is None else value
def _unequal(left, right):
    for one, two in ((left, right), (right, left)):
        if type(two) in (bool, int, float, complex, str, bytes, list, tuple, dict, type(None)):
            return one == _other(two)
    return not left == right
"""


def controlled(text: str, path: str = "<tests>") -> tuple[str, set[str]]:
    """Returns the control of a test file, and the names of the tests in it that compare something, such as `TestA::test_b`.

    Raises DataError for a text that is not Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise DataError(f"{path} is not Python: {error.msg} in line {error.lineno}") from error
    turner = _Turner(random.Random(secrets.randbits(64)))
    names: set[str] = set()
    helpers: dict[str, bool] = {}
    functions = [(node, "") for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            functions += [
                (one, f"{node.name}::") for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
    for function, _ in functions:
        before = turner.count
        turner.bound = _bound(function)
        turner.visit(function)
        helpers[function.name] = turner.count > before
    for function, prefix in functions:
        called = {_last(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        if function.name.startswith("test") and (helpers[function.name] or any(helpers.get(name) for name in called)):
            names.add(prefix + function.name)
    helpers_of_control = ast.parse(HELPERS.replace("OFFSET", str(turner.rng.randint(2, 99)))).body
    place = 0
    while place < len(tree.body) and (
        (isinstance(tree.body[place], ast.ImportFrom) and tree.body[place].module == "__future__")  # type: ignore[attr-defined]
        or (isinstance(tree.body[place], ast.Expr) and isinstance(tree.body[place].value, ast.Constant))  # type: ignore[attr-defined]
    ):
        place += 1
    tree.body[place:place] = helpers_of_control
    return ast.unparse(ast.fix_missing_locations(tree)), names


class _Turner(ast.NodeTransformer):
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.count = rng, 0
        self.bound: set[str] = set()  # the local names of the function that is visited

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        self.count += 1
        name = self.expected_name(node.test)
        if name:
            # Before the call: the code under test can read the local variables of its caller.
            return [ast.Assign([ast.Name(name, ast.Store())], _call("_other", ast.Name(name, ast.Load()))), node]
        node.test = self.turned(node.test)
        return [node]

    def expected_name(self, test: ast.expr) -> str:
        """The local variable that a value is compared with, if nothing else of the comparison reads it."""
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
            return ""
        for one, other in ((test.comparators[0], test.left), (test.left, test.comparators[0])):
            if isinstance(one, ast.Call) and _last(one.func) == "approx" and one.args:
                one = one.args[0]
            read = {node.id for node in ast.walk(other) if isinstance(node, ast.Name)}
            if isinstance(one, ast.Name) and one.id in self.bound - read:
                return one.id
        return ""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _last(node.func)
        if name in ("raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp", "warns", "assertWarns") and node.args:
            self.count += 1
            node.args[0] = ast.Name(NEVER, ast.Load()) if "arn" not in name else ast.Name("ResourceWarning", ast.Load())
        elif name in OPPOSITE and isinstance(node.func, ast.Attribute):
            self.count += 1
            place = next((n for n, one in enumerate(node.args[:2]) if _is_constant(one)), None)
            if name == "assertEqual" and place is not None:
                node.args[place] = self.changed(node.args[place])
            elif name == "assertEqual" and len(node.args) > 1:
                return ast.Call(
                    ast.Attribute(node.func.value, "assertTrue", ast.Load()), [_call("_unequal", *node.args[:2])], []
                )
            else:
                node.func.attr = OPPOSITE[name]
                if OPPOSITE[name].startswith("assertNot") and len(node.args) > 2:
                    del node.args[2:]
        return node

    def turned(self, test: ast.expr) -> ast.expr:
        """An expression that is false where `test` is true."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides = [test.left, test.comparators[0]]
            if isinstance(test.ops[0], ast.Eq):
                for number in (1, 0):
                    if _is_constant(sides[number]):
                        sides[number] = self.changed(sides[number])
                        return ast.Compare(sides[0], test.ops, [sides[1]])
                for number in (1, 0):
                    side = sides[number]
                    if isinstance(side, ast.Call) and _last(side.func) == "approx" and side.args:
                        side.args[0] = _call("_other", side.args[0])
                        return test
                return _call("_unequal", *sides)
            return ast.Compare(test.left, [TURNED[type(test.ops[0])]()], test.comparators)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return ast.BoolOp(ast.Or(), [self.turned(value) for value in test.values])
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return test.operand
        return ast.UnaryOp(ast.Not(), test)

    def changed(self, node: ast.expr) -> ast.expr:
        """A constant expression with another value of the same type."""
        if isinstance(node, ast.Call):  # pytest.approx(3.5)
            node.args[0] = self.changed(node.args[0])
            return node
        return ast.parse(repr(self.other(ast.literal_eval(node))), mode="eval").body

    def other(self, value: object) -> object:
        match value:
            case bool():
                return not value
            case int():
                return value + self.rng.choice((-1, 1)) * self.rng.randint(1, 9)
            case float() | complex():
                return value + self.rng.choice((-1, 1)) * (abs(value) + 1) * self.rng.uniform(0.5, 2)
            case str():
                return value + self.rng.choice("abcdefgh")
            case bytes():
                return value + b"x"
            case list() | tuple() if value:
                place = self.rng.randrange(len(value))
                return type(value)([*value[:place], self.other(value[place]), *value[place + 1 :]])
            case dict() if value:
                key = self.rng.choice(list(value))
                return {**value, key: self.other(value[key])}
            case set() | frozenset():
                return value | {self.rng.randint(1000, 9999)}
            case list() | tuple():
                return type(value)([0])
            case dict():
                return {0: 0}
        return self.rng.randint(1000, 9999)  # None and the dots


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    nodes = list(ast.walk(function))
    free = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (stored | {argument.arg for argument in function.args.args}) - free


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and _last(node.func) == "approx" and node.args:
        return _is_constant(node.args[0])
    try:
        repr(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _last(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))
