"""The precision policy: what a user may choose, as one frozen value that prints and parses."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import translate
from glob import escape
from typing import Collection, Dict, Iterable
from urllib.parse import quote, unquote

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
    compute : {"float16", "bfloat16"}, default "float16"
        The compute dtype: what convolutions, matrix products and the operators between them read and write. Within an
        operator sums are FP32.
    params : {None, "float16", "float32"}, default None
        Dtype in which the parameters of low-precision operators are stored. ``"float16"``: half the memory and
        all-reduce traffic, with FP32 master weights. ``"float32"``: the parameters are the master weights and are cast
        once per forward inside the graph. ``None``: ``"float16"`` for float16 on a GPU, ``"float32"`` on a CPU and for
        bfloat16 (MXNet's optimizers have no bfloat16 kernels). On one device, training gives the same numbers, bit for
        bit, either way; on several, float16 gradients are summed in float16.
    norm : {None, "float32", "compute"}, default None
        What BatchNorm reads and writes. It computes in FP32, with FP32 running statistics, gamma and beta; for an
        exception see the end. ``"float32"``: FP32, so that the graph has casts in front of it and after it. ``None``:
        the same numbers, but without these casts where the device's kernel has them inside: cuDNN's reads float16,
        computes in FP32 and rounds once. ``"compute"``: the compute dtype, where its input has it, so that there are no
        casts around it. For bfloat16 ``None`` means ``"compute"``, because casts would cost more than bfloat16 saves (a
        ResNet-50 step on a CPU: 0.98 times FP32's speed with them, 1.49 without). In float16 with ``"compute"``, a GPU
        rounds gamma and beta of a BatchNorm with ``use_global_stats`` or ``cudnn_off`` to float16, but sums in FP32.
        The rules keep LayerNorm in FP32, with one exception: in float16 with ``"compute"``, if MXNET_SAFE_ACCUMULATION
        is set in the environment, a LayerNorm over the last axis between operators in float16 reads and writes float16
        too, rounds gamma and beta, and sums in FP32.
    output : {"float32", "compute"}, default "float32"
        Dtype of the network's outputs. ``"compute"``: an output of an operator in low precision is not cast to FP32.
    exclude : iterable of str, default ()
        Patterns, as of ``fnmatch``, for the names of nodes or blocks that stay in FP32. ``"*dense0"`` keeps every block
        whose name ends with ``dense0`` in FP32, with all that it contains.
    low_ops : iterable of str, default ()
        Types of operators, such as ``"softmax"``, that compute in the compute dtype whatever the rules say. Those that
        ``exclude`` matches stay in FP32 nevertheless, and so do those for which the device has no kernel in this dtype,
        or a wrong or slow one.
    full_ops : iterable of str, default ()
        Types of operators that compute in FP32 whatever the rules say.

    Raises
    ------
    ValueError
        A field has a value that is not allowed; ``params="float16"`` is combined with bfloat16; or an operator is in
        both ``low_ops`` and ``full_ops``. The message says what is allowed.

    Examples
    --------
    >>> str(mxmp.Policy("float16", norm="compute"))
    'compute=float16,norm=compute'
    >>> mxmp.Policy.parse("compute=float16,norm=compute") == mxmp.Policy("float16", norm="compute")
    True
    >>> str(mxmp.Policy.parse("float16-fast"))
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
        """Return whether parameters that low-precision operators read are stored in float16; False means FP32.

        ``device``, ``"cpu"`` or ``"gpu"``, counts only if ``params`` is None: then a float16 network on a GPU stores
        them in float16; on a CPU, or in bfloat16, they are FP32.
        """
        if self.params is not None:
            return self.params == "float16"
        return self.compute == "float16" and device == "gpu"

    def __str__(self) -> str:
        """Return a string that ``parse`` reads: ``compute`` and all fields that differ from their default."""
        default = Policy(self.compute)
        texts = []
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if name == "compute" or value != getattr(default, name):
                items = [quote(item, safe=_PATTERN_CHARS) for item in value] if name in _LISTS else [value]
                texts.append(f"{name}={';'.join(map(str, items))}")
        return ",".join(texts)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the Policy that a text means: a recipe's name, a recipe with changes, or a policy string.

        ``"float16-fast"`` is a recipe, ``"float16-fast,exclude=*head*"`` this recipe with one field replaced. A policy
        string, such as ``"compute=float16,norm=compute,exclude=*head*;*stem*"``, is what ``str(policy)`` returns; a
        field that is left out has its default. Items of a list are separated by ``;``; in them, characters such as
        ``, ; = %`` are percent-encoded.

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
                last, near = next(reversed(values), ""), get_close_matches(field, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                if not eq and last in _LISTS:
                    hint = f"; the names in a list are separated by ';', {last}={';'.join([*values[last], part])}"
                elif ";" in field or " " in field:
                    hint = "; fields are separated by ','"
                raise ValueError(f"Policy.parse({text!r}): {part!r} is no FIELD=VALUE with FIELD one of {known}{hint}")
            if field in values:
                raise ValueError(f"Policy.parse({text!r}): field {field!r} is given twice")
            value = value.strip()
            if field in _LISTS:
                values[field] = tuple(unquote(name) for name in value.split(";") if name)
            else:
                values[field] = None if value == "None" else value
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
        "BatchNorm reads and writes float16 wherever its input is, with FP32 sums",
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
    """A dict from the names of recipes to their policies; ``print`` shows it as a table that compares them."""

    def __str__(self) -> str:
        rows = [("recipe", "policy", ""), *((name, str(policy), _RECIPES[name][1]) for name, policy in self.items())]
        first, second = (max(len(row[i]) for row in rows) for i in range(2))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)


def pattern_for(name: str) -> str:
    """Return the pattern of ``exclude`` for an operator of a plan, such as ``"loop/fc"`` or ``"fc:1"``."""
    inner = name.rpartition("/")[2]
    stem, _, number = inner.rpartition(":")
    return escape(stem if stem and number.isdigit() else inner)


def as_policy(policy: str | Policy, exclude: Iterable[str] = ()) -> Policy:
    """Return the Policy that a user's argument means, with ``exclude`` added; raise ``ValueError`` for any other."""
    if isinstance(policy, str):
        policy = Policy.parse(policy)
    if not isinstance(policy, Policy):
        text = repr(policy)
        got = text if len(text) <= 100 and "\n" not in text else f"a {type(policy).__name__}"
        raise ValueError(
            f"policy must be a recipe ({', '.join(_RECIPES)}), a policy string or an mxmp.Policy, "
            f"got {got}{_hint(policy)}"
        )
    more = _as_names("exclude", exclude)
    return replace(policy, exclude=tuple(dict.fromkeys(policy.exclude + more))) if more else policy


def pattern_of(pattern: str) -> re.Pattern:
    """Return a regular expression that matches the names that a pattern of ``exclude`` excludes."""
    # "net0_dense0" also excludes what is in the block of this name: "net0_dense0_fwd".
    return re.compile(f"{translate(pattern)}|{translate(pattern + '_*')}")


def is_policy_text(text: str) -> bool:
    """Return whether ``text`` is meant as a policy (``"float16,norm=compute"``), not as the path of a plan."""
    first = text.partition(",")[0].strip()
    return first in _RECIPES or first.partition("=")[0].strip() in [f.name for f in fields(Policy)]


def _check_choice(field: str, value: object) -> None:
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
    """Return a suggestion, ``"; did you mean 'float16'?"``, or ``""``. Empty ``allowed`` allows any policy."""
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    word = re.sub("^mixed|[^a-z0-9]", "", text.lower().rpartition(".")[2])
    if word in ("int8", "uint8") and not allowed:
        return "; INT8 is for inference, mxmp.optimize_for_inference(net, batches)"
    choices = [choice for choice in allowed if isinstance(choice, str)]
    names = {name.replace("-", ""): name for name in [*_RECIPES, "float32", *choices]}
    near = [] if word in ("float8", "float64") else get_close_matches(word, names, n=1, cutoff=0.7)
    meant = names.get(word) or _OTHER_NAMES.get(word) or (names[near[0]] if near else None)
    if meant == "float32" and meant not in allowed:
        return "; FP32 needs no policy: leave the net unconverted, or call mxmp.restore(net)"
    return f"; did you mean {meant!r}?" if meant is not None and (not allowed or meant in allowed) else ""


def _as_names(field: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        hint = f", such as {re.split('[,;] *', values)!r}" if isinstance(values, str) else ""
        if hasattr(values, "name"):
            hint = f"; of a block its name, [{values.name!r}]"
        elif callable(values):
            hint = "; only mxmp.convert(net, exclude=...) takes a filter, as only nets have blocks"
        raise ValueError(f"Policy({field}={values!r}): {field} must be a list of strings{hint}")
    names = tuple(values)
    for name in names:
        if not isinstance(name, str) or not name:
            own = getattr(name, "name", None)
            hint = f"; a block's is block.name, {own!r}" if isinstance(own, str) else ""
            if callable(name) and not hint:
                filtered = (
                    f"lambda name, block: isinstance(block, {name.__name__})" if isinstance(name, type) else "function"
                )
                hint = f"; a filter is given by itself, not in a list: mxmp.convert(net, exclude={filtered})"
            raise ValueError(f"Policy({field}={list(names)!r}): {name!r} is no name or pattern{hint}")
    return names
