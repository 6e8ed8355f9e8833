"""The precision policy: what a user may choose, as one frozen value that prints and parses."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from fnmatch import translate
from typing import Collection, Dict, Iterable
from urllib.parse import quote, unquote

__all__ = ["Policy"]

_ALLOWED = {
    "compute": ("float16", "bfloat16"),
    "params": (None, "float16", "float32"),
    "norm": (None, "float32", "compute"),
    "output": ("float32", "compute"),
}
_LISTS = ("exclude", "low_ops", "full_ops")
_PATTERN_CHARS = "*?[]!/:@"


@dataclass(frozen=True, init=False)
class Policy:
    """Which precision a network computes in, how its parameters are stored, and which operators stay in FP32.

    Parameters
    ----------
    compute : {"float16", "bfloat16"}
        The compute dtype: what convolutions, matrix products and the operators between them read and write. Sums are
        FP32.
    params : {None, "float16", "float32"}
        Dtype in which the parameters of low-precision operators are stored. ``"float16"``: half the memory and
        all-reduce traffic, with FP32 master weights. ``"float32"``: the parameters are the master weights and are cast
        once per forward inside the graph. ``None``: ``"float16"`` for float16 on a GPU, ``"float32"`` on a CPU and for
        bfloat16 (MXNet's optimizers have no bfloat16 kernels). Training is the same bit for bit on one device.
    norm : {None, "float32", "compute"}
        Whether there are casts around BatchNorm. It computes in FP32, with FP32 running statistics, gamma and beta,
        whatever this says. ``"float32"``: casts in front of it and after it, as operators of the graph. ``None``: the
        same numbers, but without these casts where the device's kernel has them inside: cuDNN's reads float16, computes
        in FP32 and rounds once. ``"compute"``: no casts on any kernel that sums in FP32: BatchNorm reads and writes the
        compute dtype. For bfloat16 ``None`` means ``"compute"``, because casts would cost more than bfloat16 saves (a
        ResNet-50 step on a CPU: 0.98 times FP32's speed with them, 1.49 without).
    output : {"float32", "compute"}
        Dtype of the network's outputs.
    exclude : iterable of str
        ``fnmatch`` patterns of nodes or blocks that stay in FP32. ``"*dense0"`` keeps the block whose name ends so,
        with all that it contains.
    low_ops, full_ops : iterable of str
        Names of operators, ``"softmax"``, that compute in the compute dtype or in FP32, whatever the rules say.

    Raises
    ------
    ValueError
        Names the field, the value and what is allowed.

    Examples
    --------
    >>> str(Policy("float16", norm="compute"))
    'compute=float16,norm=compute'
    >>> Policy.parse("compute=float16,norm=compute") == Policy("float16", norm="compute")
    True
    >>> str(Policy.parse("float16-fast"))
    'compute=float16,norm=compute'
    """

    compute: str
    params: str | None
    norm: str | None
    output: str
    exclude: tuple[str, ...]
    low_ops: tuple[str, ...]
    full_ops: tuple[str, ...]

    def __init__(
        self,
        compute: str = "float16",
        *,
        params: str | None = None,
        norm: str | None = None,
        output: str = "float32",
        exclude: Iterable[str] = (),
        low_ops: Iterable[str] = (),
        full_ops: Iterable[str] = (),
    ) -> None:
        if norm is None and compute == "bfloat16":
            norm = "compute"
        for field, value in (("compute", compute), ("params", params), ("norm", norm), ("output", output)):
            _check_choice(field, value)
            object.__setattr__(self, field, value)
        for field, values in zip(_LISTS, (exclude, low_ops, full_ops)):
            object.__setattr__(self, field, _as_names(field, values))
        if compute == "bfloat16" and params == "float16":
            raise ValueError(
                "Policy(params='float16') needs compute='float16', got compute='bfloat16': store the "
                "parameters of a bfloat16 network as params='float32'"
            )
        both = sorted(set(self.low_ops) & set(self.full_ops))
        if both:
            raise ValueError(f"Policy: {both} stand in low_ops and in full_ops; name each in one of them")

    def stores_low(self, device: str) -> bool:
        """Return whether parameters of low-precision operators are stored in float16 on ``"cpu"`` or ``"gpu"``."""
        if self.params is not None:
            return self.params == "float16"
        return self.compute == "float16" and device == "gpu"

    def __str__(self) -> str:
        """Return the policy string, which ``parse`` reads: the fields that do not have their default.

        For example ``"compute=float16,norm=compute"``; ``compute`` is always in it.
        """
        default = Policy(self.compute)
        names = [f.name for f in fields(self)]
        changed = [name for name in names if name == "compute" or getattr(self, name) != getattr(default, name)]
        return ",".join(f"{name}={_encode(getattr(self, name))}" for name in changed)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the Policy of a recipe's name, of a policy string, or of a recipe with changes.

        A policy string is ``"compute=float16,norm=compute,exclude=*head*;*stem*"``, as ``str(policy)`` returns it. List
        items are separated by ``;`` and percent-encoded where they contain one of ``, ; = %``.
        ``"float16-fast,exclude=*head*"`` is the recipe with one field replaced.

        Raises
        ------
        ValueError
            ``text`` is none of these, or a value is not allowed; the message says what is.
        """
        if not isinstance(text, str):
            raise ValueError(f"Policy.parse takes a string, got {type(text).__name__}")
        known = [f.name for f in fields(cls)]
        parts = [part for part in (p.strip() for p in text.split(",")) if part] or [""]
        recipe = None if "=" in parts[0] else parts.pop(0)
        if recipe is not None and recipe not in _RECIPES:
            raise ValueError(
                f"Policy.parse({text!r}): {recipe or text!r} is no recipe; there are {', '.join(_RECIPES)}; "
                f"or write FIELD=VALUE,... with FIELD one of {known}{_hint(recipe)}"
            )
        values: dict = {}
        for part in parts:
            field, eq, value = part.partition("=")
            field = field.strip()
            if not eq or field not in known:
                raise ValueError(f"Policy.parse({text!r}): {part!r} is no FIELD=VALUE with FIELD one of {known}")
            if field in values:
                raise ValueError(f"Policy.parse({text!r}): field {field!r} is given twice")
            values[field] = _decode(field, value.strip())
        return cls(**{**(_RECIPES[recipe][0] if recipe else {}), **values})

    @classmethod
    def recipes(cls) -> Recipes:
        """Return the recipes, a mapping from their names to policies; ``print`` shows a table of them.

        A recipe's name may be passed wherever a policy may.
        """
        return Recipes((name, cls(**values)) for name, (values, _) in _RECIPES.items())


# From the name of each recipe to the fields that it sets and what sets it apart.
_RECIPES: dict[str, tuple[dict, str]] = {
    "float16": (
        {"compute": "float16"},
        "BatchNorm computes in FP32, between casts or, on a GPU, inside cuDNN's kernel",
    ),
    "float16-fast": (
        {"compute": "float16", "norm": "compute"},
        "BatchNorm reads and writes float16 wherever its input is; its statistics, gamma and beta are FP32",
    ),
    "bfloat16": (
        {"compute": "bfloat16"},
        "on a CPU: BatchNorm reads and writes bfloat16, its statistics, gamma and beta are FP32",
    ),
    "bfloat16-safe": (
        {"compute": "bfloat16", "norm": "float32"},
        "BatchNorm in FP32; the casts can cost more than bfloat16 saves",
    ),
}


class Recipes(Dict[str, Policy]):
    """A mapping from the names of recipes to their policies; printed, a table that says what sets each apart."""

    def __str__(self) -> str:
        """Return a table with one line for each recipe: its name, its policy string and what sets it apart."""
        rows = [("recipe", "policy", ""), *((name, str(policy), _RECIPES[name][1]) for name, policy in self.items())]
        first, second = (max(len(row[i]) for row in rows) for i in range(2))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)


def as_policy(policy: str | Policy, exclude: Iterable[str] = ()) -> Policy:
    """Return the Policy that a user means by a recipe's name, a policy string or a Policy.

    The patterns ``exclude`` are added to those of the policy. Raises ``ValueError`` for anything else.
    """
    if isinstance(policy, str):
        policy = Policy.parse(policy)
    if not isinstance(policy, Policy):
        raise ValueError(
            f"policy must be a recipe ({', '.join(_RECIPES)}), a policy string or an mxmp.Policy, "
            f"got {_short(policy)}{_hint(policy)}"
        )
    more = _as_names("exclude", exclude)
    return replace(policy, exclude=tuple(dict.fromkeys(policy.exclude + more))) if more else policy


def pattern_of(pattern: str) -> re.Pattern:
    """Return a regular expression for the names of the nodes that a pattern of ``Policy.exclude`` excludes.

    ``"net0_dense0"`` matches the node of this name and all nodes in the block of this name, ``"net0_dense0_fwd"``.
    """
    return re.compile(f"{translate(pattern)}|{translate(pattern + '_*')}")


def is_policy_text(text: str) -> bool:
    """Return whether a string begins with a recipe's name or a field of Policy, as a policy string does.

    A user's ``policy`` argument may also be the path of a plan; this tells the two apart.
    """
    first = text.partition(",")[0].strip()
    return first in _RECIPES or first.partition("=")[0].strip() in [f.name for f in fields(Policy)]


def _check_choice(field: str, value: object) -> None:
    """Raise ``ValueError`` if ``value`` is not allowed for a field of Policy; the message says what is."""
    allowed = _ALLOWED[field]
    if not (value is None or isinstance(value, str)) or value not in allowed:
        is_recipe = isinstance(value, str) and value in _RECIPES
        hint = f"; the recipe of this name is Policy.parse({value!r})" if is_recipe else _hint(value, allowed)
        raise ValueError(f"Policy({field}={value!r}): {field} must be one of {list(allowed)}{hint}")


# From names of a precision in other libraries, in lower case, without punctuation and the prefix "mixed", to mxmp's.
_OTHER_NAMES = {
    **dict.fromkeys(("fp16", "half", "f16", "amp"), "float16"),
    **dict.fromkeys(("bf16", "bfloat", "bfloat16u2"), "bfloat16"),  # the last: MXNet's dtype object
    **dict.fromkeys(("fp32", "f32", "single", "full", "float", "o0"), "float32"),
    "o1": "float16,params=float32",
    "o2": "float16,params=float16",
}


def _hint(value: object, allowed: Collection[object] = ()) -> str:
    """Return a text to add to an error message, ``"; did you mean 'float16'?"``, or ``""``.

    There is one if ``value`` is another library's name for a precision (``"fp16"``, ``"O1"``) or a dtype object.
    ``allowed`` has the values that may be suggested (default: policy strings).
    """
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    word = re.sub("^mixed|[^a-z0-9]", "", text.lower().rpartition(".")[2])
    names = {name.replace("-", ""): name for name in [*_RECIPES, "float32"]}
    meant = names.get(word) or _OTHER_NAMES.get(word)
    if meant == "float32" and meant not in allowed:
        return "; FP32 needs no policy: leave the net unconverted, or call mxmp.restore(net)"
    return f"; did you mean {meant!r}?" if meant is not None and (not allowed or meant in allowed) else ""


def _short(value: object, limit: int = 100) -> str:
    """Return ``repr(value)`` for an error message, or the name of its type where that is long or has several lines."""
    text = repr(value)
    return text if len(text) <= limit and "\n" not in text else f"a {type(value).__name__}"


def _as_names(field: str, values: object) -> tuple[str, ...]:
    """Return the strings that a user gave for a list field of Policy as a tuple; raises ``ValueError`` otherwise."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        hint = f", such as [{values!r}]" if isinstance(values, str) else ""
        raise ValueError(f"Policy({field}={values!r}): {field} must be a list of strings{hint}")
    names = tuple(values)
    for name in names:
        if not isinstance(name, str) or not name:
            own = getattr(name, "name", None)
            hint = f"; a block's is block.name, {own!r}" if isinstance(own, str) else ""
            raise ValueError(f"Policy({field}={list(names)!r}): {name!r} is no name or pattern{hint}")
    return names


def _encode(value: object) -> str:
    """Return the text of a field's value in a policy string, such as ``"*head*;*stem*"`` for a tuple of patterns."""
    if isinstance(value, tuple):
        return ";".join(quote(name, safe=_PATTERN_CHARS) for name in value)
    return str(value)


def _decode(field: str, value: str) -> object:
    """Return the value of ``field`` from its text in a policy string: the inverse of ``_encode``."""
    if field in _LISTS:
        return tuple(unquote(name) for name in value.split(";") if name)
    return None if value == "None" else value
