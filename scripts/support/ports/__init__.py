"""Ported programs, right and wrong ones, and what ``verify`` is to say of each; in right/ and wrong/.

Each is a whole script, as a user writes it, that runs by itself. So they repeat what scripts repeat.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mxmp.diagnose import Verification, verify

from ..families import FAMILIES
from ..results import ROOT

PROGRAMS = Path(__file__).parent
DTYPES = ["float16", "bfloat16"]
RIGHT = sorted(path.stem for path in (PROGRAMS / "right").glob("*.py"))
# What is said of each wrong port; a plant that only float16 shows is right in bfloat16.
SCALE = "with the loss scale in them"
TOO_SMALL = "4096 times too small"
TOO_WIDE = "one rounding of the initial weights alone"
WRONG: dict[str, tuple[str | None, ...]] = {
    "always_overflows": ("skipped all 20 steps", None),
    "batch_has_scale": (TOO_SMALL,) * 2,
    "clips_scaled": ("is read between a scaled backward and the step",) * 2,
    "clips_values_scaled": (SCALE,) * 2,
    "climbs_by_scaled": (SCALE,) * 2,
    "collected_outside": ("it puts a result into 'FEATURES'",) * 2,
    "custom_operator": ("Custom writes its own gradient",) * 2,
    "decays_by_hand": (SCALE,) * 2,
    "difference_of_large": ("is more than rounding",) * 2,
    "divides_twice": (TOO_SMALL,) * 2,
    "ids_in_float16": ("the script casts to low precision itself",) * 2,
    "input_gradient": ("trainer.input_grad(x)",) * 2,
    "leaves_out_scaled": ("leaves out or repeats steps",) * 2,
    "module_clips": (SCALE,) * 2,
    "module_input_gradient": (SCALE,) * 2,
    "module_noise": (SCALE,) * 2,
    "module_rate_by_norm": (SCALE,) * 2,
    "module_rescale": (TOO_SMALL,) * 2,
    "module_scales_heads": ("4096 times too large",) * 2,
    "module_updates_by_hand": ("writes into weights between two steps",) * 2,
    "noise_in_gradients": (SCALE,) * 2,
    "one_trainer_left": ("a gluon.Trainer is left", None),
    "outside_scale_loss": ("was not of the scaled loss",) * 2,
    "own_momentum": (TOO_SMALL,) * 2,
    "plain_backward": ("instead of loss.backward()",) * 2,
    "rate_by_norm": (SCALE,) * 2,
    "raw_year": (None, TOO_WIDE),  # float16 has whole numbers up to 2048
    "scales_twice": ("4096", "4096"),
    "sign_descent": (TOO_SMALL,) * 2,
    "slope_by_a_tiny_step": ("is more than rounding",) * 2,
    "slow_weights": ("mxmp.master_weights(net)", None),
    "slower_by_norm": (SCALE,) * 2,
    "steps_of_two_trainers": (SCALE,) * 2,
    "trust_ratio_by_hand": (TOO_SMALL,) * 2,
    "two_trainers": ("give both the same scaler object",) * 2,
    "updates_by_hand": (SCALE,) * 2,
}


# Recipes and examples that are not in the table of families, with their arguments.
EXAMPLES = ("arcface.py", "forecast.py", "weight_dropout.py", "../dcgan.py")


class Port(NamedTuple):
    """A program in one dtype; ``expected`` is a part of what is said of a wrong one, None of a right one."""

    name: str
    dtype: str
    expected: str | None
    kind: str
    path: Path
    arguments: tuple[str, ...] = ()

    def verified(self, seed: int = 0, steps: int = 20) -> Verification:
        return verify(self.path, steps, arguments=self.arguments, seed=seed, progress=False)

    @property
    def status(self) -> int:
        """Return 2 where nothing can be said, 1 for another wrong port and 0 for a right one."""
        return 0 if self.expected is None else 1 + (self.expected == TOO_WIDE)

    def is_answered(self, found: Verification) -> bool:
        return found.status == self.status and (self.expected or "") in str(found)


def _program(name: str, dtype: str, expected: str | None, kind: str) -> Port:
    return Port(name, dtype, expected, kind, PROGRAMS / kind / f"{name}.py", (dtype,))


def _recipe(command: str, dtype: str) -> Port:
    script, *arguments = command.split()
    path = (ROOT / "examples" / "recipes" / script).resolve()
    name = " ".join([path.stem, *arguments])
    option = "--policy" if path.parent.name == "examples" else "--dtype"
    return Port(name, dtype, None, "recipe", path, (*arguments, option, dtype))


PORTS = [_program(name, dtype, None, "right") for name in RIGHT for dtype in DTYPES]
PORTS += [_program(name, dtype, said, "wrong") for name in WRONG for dtype, said in zip(DTYPES, WRONG[name])]
RECIPES = [
    _recipe(command, dtype) for command in (*EXAMPLES, *(each.recipe for each in FAMILIES.values())) for dtype in DTYPES
]
