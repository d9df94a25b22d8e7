"""Collect the messages that an operator or a client may read, from the source itself.

Collected are answers with an error, what a link is refused or lost for, what ends a
process, and what is logged at WARNING and above: the arguments of the calls that carry such
texts. What varies in a text is ``…``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = ["PACKAGES", "VARIES", "Message", "collected", "literals"]

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "frontend": "frontend",
    "worker": "worker",
    "protocol": "both",
    "deploy": "`tokenwire-up`, `tokenwire-keys`",
}
"""Folders, and who speaks there."""

SILENT = {"deploy/progress.py", "deploy/helm/tokenwire/files/tests/serving.py"}
"""Modules whose texts say that all is well, or what `helm test` has found."""

VARIES = "…"

LOGGED = {"warning", "error", "critical", "exception"}

EXITS = {"exit", "error", "SystemExit", "ArgumentTypeError", "ParserError"}

CARRIERS = {
    # Of a link: what is told of a worker, or sent to a peer.
    *(
        "Refused",
        "EngineDead",
        "Bye",
        "Incompatible",
        "_refuse",
        "_begin_anew",
        "_reset",
    ),
    *("_lose", "handshake_failed", "say", "lost", "lose_all", "Finished", "_lost"),
    *("insert", "_set_state", "close", "_complain", "failed"),
    # Of the admin plane.
    *("AdminDone", "AdminOutcome", "_failed"),
    *("_unreadable", "_bad_structure", "_note", "_give_up", "_phase", "GiveUp"),
}
"""Calls whose texts are read, beside those that raise and those that log."""

NOT_TEXTS = {"code", "kind", "param", "headers", "extra", "exc_info", "metavar"}

SPOKEN = {"msg", "text", "reason", "error", "why", "fault"}
"""Variables that hold what is said, wherever they lead."""

INTERNAL = {
    "AssertionError",
    "LocalProtocolError",
    "NotImplementedError",
    "StopIteration",
}
"""Bugs of ours: their texts are for us, in a traceback."""

PARTS = {
    *("exit code …", "hidden states of layers …", "no hidden states", "… (pid …)"),
    *("… (loaded by update …)", "tokenwire-worker: … (… s)"),
    "a journal without entries is above its bounds",
}
"""Of other messages, which have their meaning; what says that all is well; a bug."""

_REASON = re.compile(r"(str|tuple\[.*\bstr\b.*\])( \| None)?")
"""What a function returns that gives a reason, or none."""

_FIELD = re.compile(r"\{\w+(:[^{}]*)?\}")  # of str.format
_PERCENT = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[sdrfxgi])")


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """One text, with ``…`` for what varies."""

    text: str
    how: str  # "answer" | "log" | "exit" | "link" | "raised"
    module: str  # where it stands, as frontend/server.py


@cache
def collected(root: Path = ROOT) -> list[Message]:
    """Return all messages, sorted by text."""
    trees = {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for package in PACKAGES
        for path in _modules(root / package)
        if path.relative_to(root).as_posix() not in SILENT
    }
    scopes = {module: list(_scopes(tree)) for module, tree in trees.items()}
    makers = _makers(one for some in scopes.values() for one in some)
    found: dict[str, Message] = {}
    imported = _constants(node for tree in trees.values() for node in tree.body)
    for module, tree in trees.items():
        constants = {**imported, **_constants(tree.body)}
        for scope in scopes[module]:
            names = {**constants, **_assigned(scope)}
            for node, how in _carriers(scope, makers):
                texts = [node] if not isinstance(node, ast.Call) else _arguments(node)
                for text in (text for one in texts for text in _texts(one, names)):
                    text = text.strip()
                    if _is_text(text) and text not in PARTS:
                        found.setdefault(text, Message(text, how, module))
    return sorted(found.values())


def _modules(package: Path) -> Iterator[Path]:
    """Yield the files of a package; what is only packed into a chart is none."""
    yield from (
        path for path in sorted(package.rglob("*.py")) if "helm" not in path.parts
    )


def literals(root: Path = ROOT) -> set[str]:
    """Return every text of the source, whoever reads it."""
    return {
        _whole(node).strip()
        for package in PACKAGES
        for path in _modules(root / package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    }


@dataclass(slots=True)
class Scope:
    """A function, or what of a module stands in none."""

    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
    outer: Scope | None = None
    nodes: list[ast.AST] = field(default_factory=list[ast.AST])  # but for inner ones

    @property
    def returns(self) -> str:
        """What a function returns, as it is annotated."""
        if isinstance(self.node, ast.Module) or self.node.returns is None:
            return ""
        return ast.unparse(self.node.returns)


def _scopes(tree: ast.Module) -> Iterator[Scope]:
    """Yield every function, and the module."""
    waiting: list[Scope] = [Scope(tree)]
    while waiting:
        scope = waiting.pop()
        below = list(ast.iter_child_nodes(scope.node))
        while below:
            node = below.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                waiting.append(Scope(node, scope))
            else:
                scope.nodes.append(node)
                below += ast.iter_child_nodes(node)
        yield scope


def _makers(scopes: Iterable[Scope]) -> set[str]:
    """Return the functions that make an answer: those that return an ``ApiError``."""
    return {"ApiError"} | {
        scope.node.name
        for scope in scopes
        if not isinstance(scope.node, ast.Module) and "ApiError" in scope.returns
    }


def _constants(body: Iterable[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Return a module's constants."""
    return {
        node.targets[0].id: [node.value]
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id.isupper()
    }


def _assigned(scope: Scope) -> dict[str, list[ast.expr]]:
    """Return what is assigned to each name that is local there, in any way."""
    values = _assigned(scope.outer) if scope.outer else {}
    for node in scope.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.Assign(
                targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=parts)
            ):
                for target, value in zip(names, parts, strict=False):
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, []).append(value)
            case _:
                pass
    return values


def _carriers(scope: Scope, makers: set[str]) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions below *scope* whose texts are read, and how."""
    returns_text = bool(_REASON.fullmatch(scope.returns))
    for node in scope.nodes:
        match node:
            case ast.Raise(exc=ast.Call() as call) if _name(call) not in INTERNAL:
                yield call, "answer" if _name(call) in makers else "raised"
            case ast.Call() as call:
                how = _kind(call, makers)
                if how:
                    yield call, how
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in SPOKEN:
                yield value, "told"
            case ast.Return(value=ast.Call() as call) if _name(call).endswith("Error"):
                yield call, "raised"
            case ast.Return(value=ast.expr() as value) if returns_text:
                yield value, "told"
            case _:
                pass


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _kind(call: ast.Call, makers: set[str]) -> str:
    name = _name(call)
    match call.func:
        case ast.Attribute(value=ast.Name(id=on)) if name in LOGGED:
            if "log" in on.lower():
                return "log"
        case _:
            pass
    if name in EXITS:
        return "exit"
    if name in makers:
        return "answer"
    if name in {"print", "write"}:
        return "exit" if "stderr" in ast.unparse(call) else ""
    if name in CARRIERS or any(_is_kind(argument) for argument in _arguments(call)):
        return "told"
    return ""


def _is_kind(node: ast.expr) -> bool:
    """Return whether *node* is an ``ErrorKind``: beside it stands an error's text."""
    match node:
        case ast.Attribute(value=ast.Name(id="ErrorKind")):
            return True
        case _:
            return False


def _arguments(call: ast.Call) -> list[ast.expr]:
    named = [one.value for one in call.keywords if one.arg not in NOT_TEXTS]
    return [*call.args, *named]


def _texts(node: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yield the texts that *node* may come to, or that a call is given."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            yield from _texts(value, names)
        case ast.Call():
            pass  # a carrier of its own, or nothing that is known here
        case ast.Name(id=name):
            # Once: a name may be made of itself.
            others = {key: value for key, value in names.items() if key != name}
            for value in names.get(name, []):
                yield from _texts(value, others)
        case ast.IfExp(body=body, orelse=orelse):
            yield from _texts(body, names)
            yield from _texts(orelse, names)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _texts(value, names)
        case ast.Dict(values=values):
            for value in values:
                yield from _texts(value, names)
        case ast.Subscript(value=value):
            yield from _texts(value, names)
        case ast.Tuple(elts=values) | ast.List(elts=values):
            for value in values:
                yield from _texts(value, names)
        case ast.BinOp(op=ast.Mod(), left=left):
            yield from _texts(left, names)
        case _:
            yield _whole(node)


def _whole(node: ast.expr) -> str:
    """Return a text with what varies in it as ``…``."""
    match node:
        case ast.Constant(value=str() as text):
            return _FIELD.sub(VARIES, _PERCENT.sub(_unpercent, text))
        case ast.JoinedStr(values=parts):
            return "".join(map(_whole, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _whole(left) + _whole(right)
        case _:
            return VARIES


def _unpercent(found: re.Match[str]) -> str:
    return "%" if found[0] == "%%" else VARIES


def _is_text(text: str) -> bool:
    """Return whether somebody may read it: more than a name or a form."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 1 and " " in text.strip()
