"""`Tape`: every call on tensors during one forward pass, and which module each value came from.

    with torch.no_grad(), Tape(model, inputs) as tape:
        model(**inputs)
    tape.nodes          # one `Node` per tensor that a call returned, in order

Calls are caught with a `TorchFunctionMode`, so no module has to be known. Tensors are compared by identity: the tape
keeps every value alive while it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from locater.calls.function_table import fills, name_of, writes_in_place
from locater.calls.recognise import part_name
from locater.discovery.tape.canonical_calls import Origin, canonical_form, has_both, in_double
from locater.torch_private import tree_flatten, tree_map

# functions of torch.nn.functional that hide attention: what they call is written down, not they
LOOKED_INTO = (torch.nn.functional.multi_head_attention_forward,)
LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")  # of a second tensor these take dtype or shape alone


@dataclass(eq=False, repr=False)
class Node:
    """One tensor on the tape. `args` and `kwargs` are those of the call that returned it, with nodes for tensors."""

    value: Tensor
    order: int
    name: str = "leaf"  # the usual one of the function; "leaf" where no call made it: parameters, buffers, inputs
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    part: int | None = None  # which of several results
    modules: tuple[str, ...] = ()  # paths of the modules that were running, the innermost last
    moving: bool = False  # depends on the inputs' numbers or embeddings
    from_ids: bool = False  # depends on integer inputs
    in_place: bool = False
    inputs: list[Node] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Node({self.order}, {self.name!r}, {list(self.value.shape)})"  # not what it was made of, and so on


@dataclass(frozen=True)
class ModuleResult:
    """A value that a module returned."""

    module: nn.Module
    path: str
    source: Node  # the first tensor that the module was given


class Tape(TorchFunctionMode):
    """Writes down all calls on tensors while it is entered. The model's modules carry hooks until it is left.

    `precise`: float64 activations and parameters that the model casts to float32, as norms and softmax do, stay as
    they are. Constants, such as angles of positions, are computed as the model says.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], precise: bool = False) -> None:
        super().__init__()
        self._precise = precise
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self.nodes: list[Node] = []
        self.made: dict[Node, ModuleResult] = {}
        self.called: set[str] = set()  # paths of modules that ran
        self._model = model
        self._nodes_by_id: dict[int, Node] = {}
        self._order = 0
        self._running: list[str] = []
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._names: dict[int, str] = {}
        for name, tensor in named:
            self._names.setdefault(id(tensor), name)
        self._tensors = dict(named)
        self._buffers = list(model.buffers())
        tensors = [x for x in tree_flatten(dict(inputs))[0] if isinstance(x, Tensor)]
        self._given = {id(x): x.is_floating_point() for x in tensors}
        self._keep = tensors  # identities stay those of these tensors
        self._alive: list[Tensor] = []  # an id is unique only while its tensor lives
        self._consumers: dict[Node, list[Node]] | None = None
        self._made_from: dict[Node, list[Node]] | None = None

    def __enter__(self) -> Tape:
        self._handles = []
        for path, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter_module(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_module(path), with_kwargs=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOOKED_INTO:
            return self._look_into(func, args, kwargs)
        name = name_of(func)
        other = canonical_form(name, func, args, kwargs, self._origin)
        if other is not None:
            with _Again(self):
                return other()
        if self._precise and args and isinstance(args[0], Tensor) and self._stays(args[0]):
            if name == "float" or (name in ("to", "type") and torch.float32 in (*args[1:], *kwargs.values())):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        known_args, known_kwargs = tree_map(
            lambda x: self.node(x) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs))
        )
        in_place = writes_in_place(func)
        target = known_args[0] if in_place and known_args and isinstance(known_args[0], Node) else None
        bases, same = ([], []) if target is None else _bases(target)
        written = [base.value for base in bases]
        for base in [*bases, *same]:  # nodes keep the values from before the write
            base.value = base.value.detach().clone()
        try:
            out = func(*args, **kwargs)
        except RuntimeError:
            if in_place or not has_both((args, kwargs)):
                raise
            func = in_double(func)  # some models make tensors in float32, whatever their own dtype
            out = func(*args, **kwargs)
        result = args[0] if name == "__setitem__" else out
        for part, x in enumerate(result if isinstance(result, tuple | list) else [result]):
            if isinstance(x, Tensor) and (in_place or id(x) not in self._names):
                single = isinstance(result, Tensor)
                self._write(x, name, func, known_args, known_kwargs, None if single else part, in_place)
        for view, base, tensor in zip(bases, bases[1:], written[1:], strict=False):
            self._write(tensor, "written", _write_through(view), (base, self._last), {}, None)
        return out

    def node(self, x: Tensor) -> Node:
        """The node of a tensor; tensors that no call returned become leaves."""
        known = self._nodes_by_id.get(id(x))
        if known is None:
            given = self._given.get(id(x))
            known = self._register(x, Node(x, 0, moving=given is True, from_ids=given is False))
        return known

    def _origin(self, x: Tensor) -> Origin:
        """How a tensor was made. What returned its own argument (a cast to the dtype that it has) made nothing."""
        node = self.node(x)
        while (before := _same_tensor(node)) is not None:
            node = before
        inputs = [y.value for y in node.inputs]
        part = part_name(node.name, node.args, node.kwargs, inputs[0].ndim) if inputs else node.name
        return Origin(node.name, part, inputs, node.moving)

    def parameter(self, node: Node, depth: int = 12) -> str | None:
        """Name of the one parameter or buffer that a constant is made of."""
        if id(node.value) in self._names:
            return self._names[id(node.value)]
        names = self.parameters(node, depth)
        return names.pop() if len(names) == 1 else None

    def parameters(self, node: Node, depth: int = 12) -> set[str]:
        """Names of all parameters and buffers that a constant is made of, in at most `depth` calls."""
        if id(node.value) in self._names:
            return {self._names[id(node.value)]}
        return set().union(*(self.parameters(x, depth - 1) for x in node.inputs)) if depth else set()

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer of the model."""
        return self._tensors[name]

    def buffers(self) -> list[Tensor]:
        """Every buffer of the model."""
        return self._buffers

    def consumers(self, node: Node) -> list[Node]:
        """Nodes that were computed from this one, in order."""
        if self._consumers is None:
            self._consumers = {}
            for after in self.nodes:
                for before in after.inputs:
                    self._consumers.setdefault(before, []).append(after)
        return self._consumers.get(node, [])

    def made_from(self, node: Node) -> list[Node]:
        """What modules made whose first argument this node was."""
        if self._made_from is None:
            self._made_from = {}
            for result, made in self.made.items():
                self._made_from.setdefault(made.source, []).append(result)
        return self._made_from.get(node, [])

    def _stays(self, x: Tensor) -> bool:
        return x.dtype == torch.float64 and (id(x) in self._parameters or self.node(x).moving)

    def _register(self, x: Tensor, node: Node) -> Node:
        self._order += 1
        node.order = self._order
        self._nodes_by_id[id(x)] = node
        self._alive.append(x)
        return node

    def _write(
        self,
        x: Tensor,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        part: int | None,
        in_place: bool = False,
    ) -> None:
        inputs = [y for y in tree_flatten((args, kwargs))[0] if isinstance(y, Node)]
        inputs = inputs[:1] if name in LIKE else inputs
        from_ids = any(y.from_ids for y in inputs)
        moving = any(y.moving for y in inputs) and not fills(name)
        moving |= name == "embedding" and from_ids
        # a map of learned tokens (queries of a pool or a detector) is an activation too
        moving |= name in ("linear", "addmm")
        node = Node(x, 0, name, func, args, kwargs, part, tuple(self._running), moving, from_ids, in_place, inputs)
        self._last = self._register(x, node)
        self.nodes.append(node)

    def _look_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function written in Python so that its own calls are written down."""
        functional: Any = torch.nn.functional
        before = functional.has_torch_function
        functional.has_torch_function = lambda *_: False
        try:
            with _Again(self):
                return func(*args, **kwargs)
        finally:
            functional.has_torch_function = before

    def _enter_module(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(path)
            self.called.add(path)

        return hook

    def _leave_module(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if self._running:
                self._running.pop()
            source, result = _first_tensor((args, kwargs)), _first_tensor(out)
            if source is not None and result is not None and source is not result:
                node = self.node(result)
                self.made.setdefault(node, ModuleResult(module, path, self.node(source)))

        return hook


class _Again(TorchFunctionMode):
    """Passes every call to a tape, from inside a call that the tape is handling."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tape.__torch_function__(func, types, args, kwargs)


def _bases(view: Node) -> tuple[list[Node], list[Node]]:
    """A node, what it is a view of, what that is a view of, and so on; and the nodes whose functions returned the same
    tensors again.
    """
    bases: list[Node] = []
    same: list[Node] = []
    while True:
        while (before := _same_tensor(view)) is not None:
            same.append(view)
            view = before
        bases.append(view)
        if view.part is not None or not view.args or not _shares_memory(view, view.args[0]):
            return bases, same
        view = view.args[0]


def _same_tensor(node: Node) -> Node | None:
    """The input that the function of a node returned as it is: a cast to the dtype that it has. None for others."""
    return next((x for x in node.inputs if x.value is node.value), None)


def _shares_memory(view: Node, base: Any) -> bool:
    """Whether a call gave its first argument in another form, and no copy: reshape and flatten do either."""
    if not isinstance(base, Node) or view.in_place or view.value is base.value:
        return False
    return view.value.untyped_storage().data_ptr() == base.value.untyped_storage().data_ptr()


def _write_through(view: Node) -> Callable[[Tensor, Tensor], Tensor]:
    """What a write into a view does to its base."""

    def write(base: Tensor, value: Tensor) -> Tensor:
        base = base.clone()
        assert view.func is not None
        view.func(base, *view.args[1:], **view.kwargs).copy_(value)
        return base

    return write


def _first_tensor(x: Any) -> Tensor | None:
    return next((y for y in tree_flatten(x)[0] if isinstance(y, Tensor)), None)


# ---- a part of a tape computed again, with other values for some of its nodes


def replay(node: Node, given: Mapping[Node, Tensor]) -> Tensor:
    """The value of `node` if the nodes of `given` had these values; everything else is as it was."""
    start = min(n.order for n in given)
    values: dict[Node, Tensor] = dict(given)
    for step in _nodes_between(node, given, start):
        args, kwargs = tree_map(
            lambda x: values.get(x, x.value) if isinstance(x, Node) else x, (step.args, step.kwargs)
        )
        values[step] = _call_again(step, args, kwargs)
    return values.get(node, node.value)


def _call_again(step: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    assert step.func is not None
    if step.in_place:
        args = (args[0].clone(), *args[1:])
    out = step.func(*args, **kwargs)
    if step.name == "__setitem__":
        return args[0]
    return out if step.part is None else out[step.part]


def _nodes_between(node: Node, given: Mapping[Node, Tensor], start: int) -> list[Node]:
    """The nodes on the way from `given` to `node`, in the order of their calls."""
    reached: set[Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n not in reached and n not in given and n.func is not None and n.order > start:
            reached.add(n)
            todo += n.inputs
    changed: set[Node] = set(given)
    steps = []
    for n in sorted(reached, key=lambda n: n.order):
        if any(x in changed for x in n.inputs):
            changed.add(n)
            steps.append(n)
    return steps
