"""The command line of the ImageNet examples: the names of GluonCV's train_imagenet.py."""

import argparse
from pathlib import Path
from typing import List, NoReturn, Optional, Sequence, Union

import mxmp

from .errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")


def _loss_scale(text: str) -> Union[str, float]:
    if text in ("dynamic", "none"):
        return text
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: dynamic, none, a positive number")
    return scale


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number from 1")
    return int(text)


def _epochs(text: str) -> List[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: epochs with commas, such as 30,60,90") from None


def make_parser(description: str) -> argparse.ArgumentParser:
    """Every option, grouped as a user would look for it."""
    parser = _Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_model(parser.add_argument_group("model and precision"))
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_schedule(parser.add_argument_group("learning rate"))
    _add_files(parser.add_argument_group("checkpoints and logging"))
    return parser


def _add_model(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", required=True, help="a GluonCV classification network")
    group.add_argument("--use-pretrained", action="store_true", help="start from GluonCV's weights")
    group.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    group.add_argument(
        "--policy",
        default=None,
        help="a policy of that dtype, such as float16 or compute=float16,norm=compute, or a plan (.json) that "
        "python -m mxmp tune wrote; when not given: float16-fast for float16 on a GPU, otherwise the dtype's own",
    )
    group.add_argument(
        "--loss-scale",
        type=_loss_scale,
        default=None,
        help="dynamic, none or a number; when not given: dynamic for float16, otherwise none",
    )
    group.add_argument("--last-gamma", action="store_true", help="start each block's last gamma at 0")
    group.add_argument("--num-gpus", type=int, default=None, help="when not given: all there are, else the CPU")


def _add_data(group: "argparse._ArgumentGroup") -> None:
    home = Path("~/.mxnet/datasets/imagenet/rec")
    group.add_argument("--use-rec", action="store_true", help="accepted as in GluonCV; RecordIO is always used")
    group.add_argument("--rec-train", type=Path, default=home / "train.rec")
    group.add_argument("--rec-train-idx", type=Path, default=None, help="when not given: beside the .rec")
    group.add_argument("--rec-val", type=Path, default=home / "val.rec")
    group.add_argument("--rec-val-idx", type=Path, default=None, help="when not given: beside the .rec")
    group.add_argument("--num-classes", type=_positive, default=1000)
    group.add_argument("--input-size", type=_positive, default=224)
    group.add_argument("--crop-ratio", type=float, default=0.875, help="validation crop / resized edge")
    group.add_argument(
        "--augment",
        choices=["imagenet", "shift", "none"],
        default="imagenet",
        help="imagenet: crops, mirror, colour; shift: by up to an eighth (digits); none",
    )
    group.add_argument("-j", "--num-workers", "--num-data-workers", type=_positive, default=4)


def _add_training(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--batch-size", type=_positive, default=32, help="per device")
    group.add_argument("--num-epochs", type=_positive, default=90)
    group.add_argument(
        "--optimizer",
        choices=["nag", "sgd"],
        default="nag",
        help="nag is GluonCV's; on the CPU MXNet rounds its weight decay differently from run to run",
    )
    group.add_argument("--momentum", type=float, default=0.9)
    group.add_argument("--wd", type=float, default=0.0001, help="weight decay")
    group.add_argument("--no-wd", action="store_true", help="no weight decay on bias, gamma and beta")
    group.add_argument("--label-smoothing", action="store_true", help="smooth the labels by 0.1")
    group.add_argument("--mixup", action="store_true")
    group.add_argument("--mixup-alpha", type=float, default=0.2, help="of the beta distribution")
    group.add_argument("--mixup-off-epoch", type=int, default=0, help="how many last epochs go without")
    group.add_argument("--kvstore", choices=["local", "device", "nccl"], default="device")
    group.add_argument("--seed", type=int, default=0)


def _add_schedule(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--lr", type=float, default=0.1)
    group.add_argument("--lr-mode", choices=["cosine", "poly", "step"], default="cosine")
    group.add_argument("--lr-decay", type=float, default=0.1, help="factor of the step mode")
    group.add_argument("--lr-decay-epoch", type=_epochs, default=[30, 60, 80], help="of the step mode")
    group.add_argument("--lr-decay-period", type=int, default=0, help="step mode: every so many epochs")
    group.add_argument("--warmup-epochs", type=int, default=0)
    group.add_argument("--warmup-lr", type=float, default=0.0, help="where the warm-up starts")


def _add_files(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--save-dir", type=Path, default=Path("params"))
    group.add_argument("--save-frequency", type=int, default=10, help="epochs between checkpoints; 0: none")
    group.add_argument("--resume-epoch", type=int, default=0, help="epochs already done")
    group.add_argument("--resume-params", type=Path, default=None)
    group.add_argument("--resume-states", type=Path, default=None)
    group.add_argument("--log-interval", type=_positive, default=50, help="batches between log lines")
    group.add_argument("--logging-file", type=Path, default=None, help="also log to this file")
    group.add_argument("--results", type=Path, default=None, help="write the figures and curves here as JSON")
    group.add_argument("--explain", action="store_true", help="print what precision each layer got")


def _policy(options: argparse.Namespace) -> Union[mxmp.Policy, mxmp.Plan, None]:
    """What `--policy` says, which must be for `--dtype`."""
    if options.policy is None:
        return None
    try:
        plan = mxmp.Plan.load(options.policy) if options.policy.endswith(".json") else None
        policy = plan.policy if plan else mxmp.Policy.parse(options.policy)
    except (OSError, ValueError) as error:
        raise UserError(f"--policy {options.policy}: {error}") from None
    if policy.compute != options.dtype:
        raise UserError(f"--policy {options.policy} is for --dtype {policy.compute}, not {options.dtype}")
    return plan or policy


def parse_options(description: str, arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The options, checked against each other."""
    options = make_parser(description).parse_args(arguments)
    options.policy = _policy(options)
    if options.loss_scale is None:
        options.loss_scale = "dynamic" if options.dtype == "float16" else "none"
    if options.warmup_epochs >= options.num_epochs and options.warmup_epochs > 0:
        raise UserError(
            f"--warmup-epochs {options.warmup_epochs}; allowed: fewer than --num-epochs {options.num_epochs}"
        )
    if options.resume_epoch and not options.resume_params:
        raise UserError(f"--resume-epoch {options.resume_epoch} needs --resume-params (and --resume-states)")
    if not 0 < options.crop_ratio <= 1:
        raise UserError(f"--crop-ratio {options.crop_ratio}; allowed: above 0, up to 1")
    return options
