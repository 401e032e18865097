"""What a template makes of a conversation apart from its contents, for templates that only copy those.

Most templates of the ChatML kind write each message's content as it is. For them the text around the
contents follows from the roles alone:

    roles (system, user)  ──►  <|im_start|>system\\n · <|im_end|>\\n<|im_start|>user\\n · <|im_end|>\\n

That is rendered once and kept; the next conversation with the same roles is put together from it. Whether
a template is of this kind is decided from its syntax tree: anything that could look at a content, or at
the clock, makes it an ordinary one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

from jinja2 import nodes

MAX_KEPT = 256
MAX_KEPT_MESSAGES = 64
_SLOT = "\ufdd0{}\ufdd1"  # noncharacters: no role that is kept holds them, nor any template that is accepted
_SLOTS = re.compile("\ufdd0([0-9]+)\ufdd1")
_LOOP_FIELDS = frozenset({"first", "last", "index", "index0", "length", "revindex", "revindex0"})


class Skeletons:
    """Renders conversations of plain messages with one template. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, list[str]] = OrderedDict()
        self._lock = Lock()

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        render: Callable[[list[dict[str, Any]]], str],
    ) -> str | None:
        """What ``render`` would make of ``messages``; None where something but roles and contents matters."""
        roles: list[str] = []
        contents: list[str] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if len(message) != 2 or type(role) is not str or type(content) is not str or not role.isascii():
                return None
            roles.append(role)
            contents.append(content)
        key = (add_generation_prompt, *roles)
        with self._lock:
            parts = self._kept.get(key)
            if parts is not None:
                self._kept.move_to_end(key)
        if parts is None:
            slots = [{"role": role, "content": _SLOT.format(index)} for index, role in enumerate(roles)]
            parts = _SLOTS.split(render(slots))
            if len(roles) <= MAX_KEPT_MESSAGES:
                self._keep(key, parts)
        filled = parts.copy()
        filled[1::2] = [contents[int(index)] for index in parts[1::2]]
        return "".join(filled)

    def _keep(self, key: Hashable, parts: list[str]) -> None:
        with self._lock:
            self._kept[key] = parts
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)


def copies_contents(tree: nodes.Template, source: str) -> bool:
    """Whether a template does nothing with a message's content but write it, each time as it is."""
    if "\ufdd0" in source or "\ufdd1" in source:
        return False
    targets = [
        loop.target
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages"
    ]
    if not all(isinstance(target, nodes.Name) for target in targets):
        return False
    loops = {target.name for target in targets if isinstance(target, nodes.Name)}
    for name in tree.find_all(nodes.Name):
        is_set = name.ctx != "load" and not any(name is target for target in targets)
        if is_set and (name.name in loops or name.name in ("messages", "loop")):
            return False
    return _only_copied(tree, (), loops)


def _only_copied(node: nodes.Node, parents: tuple[nodes.Node, ...], loops: set[str]) -> bool:
    if isinstance(node, nodes.Name) and node.ctx == "load" and not _name_is_fine(node, parents, loops):
        return False
    return all(_only_copied(child, (*parents, node), loops) for child in node.iter_child_nodes())


def _name_is_fine(name: nodes.Name, parents: tuple[nodes.Node, ...], loops: set[str]) -> bool:
    parent = parents[-1]
    if name.name == "strftime_now":
        return False
    if name.name == "loop":
        return _key_of(parent) in _LOOP_FIELDS
    if name.name == "messages":
        if isinstance(parent, nodes.For):
            return parent.iter is name
        if isinstance(parent, nodes.Filter):
            return parent.name in ("length", "count") and parent.node is name
        if isinstance(_key_of(parent), int):
            return _field_is_fine(parents[:-1])
        return False
    return name.name not in loops or _field_is_fine(parents)


def _field_is_fine(parents: tuple[nodes.Node, ...]) -> bool:
    """Whether the last of ``parents`` takes a message's field, the content only to write it."""
    field = _key_of(parents[-1])
    if not isinstance(field, str):
        return False
    if field != "content":
        return field == "role"  # its value is part of the key
    for parent in reversed(parents[:-1]):
        if not isinstance(parent, (nodes.Add, nodes.Concat)):
            return isinstance(parent, nodes.Output)
    return False


def _key_of(node: nodes.Node) -> Any:
    """What ``node`` looks up, if that is a constant."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if not isinstance(node, nodes.Getitem):
        return None
    index = node.arg.node if isinstance(node.arg, nodes.Neg) else node.arg  # messages[-1]
    return index.value if isinstance(index, nodes.Const) else None
