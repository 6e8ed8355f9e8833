"""Every family of networks that `scripts/parity.py` trains, with the command that trains it."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A row of the table.

    ``recipe``: a file of examples/recipes with its arguments. ``better``: the "higher" or "lower" values of its metric.
    ``tolerance``: means so close are equal whatever their errors, in the metric's own unit (points where it has them).
    ``ablations``: options of runs without a safeguard, float16, to show what it is for.
    """

    recipe: str
    better: str = "higher"
    seeds: int = 5
    tolerance: float = 0.2
    ablations: tuple[str, ...] = ()


FAMILIES = {
    "alexnet": Family("classify.py alexnet"),
    "vgg16": Family("classify.py vgg16"),
    "googlenet": Family("classify.py googlenet"),
    "inceptionv2": Family("classify.py inceptionv2"),
    "inceptionv3": Family("classify.py inceptionv3"),
    "resnet50": Family("classify.py resnet50"),
    "resnext50": Family("classify.py resnext50"),
    "faster_rcnn": Family("rcnn.py faster_rcnn"),
    "mask_rcnn": Family("rcnn.py mask_rcnn"),
    "ssd": Family("ssd.py"),
    "segmentation": Family("segmentation.py"),
    "resnet50_symbolic": Family("classify_symbolic.py"),
    "ssd_symbolic": Family("ssd_symbolic.py"),
    # Language, speech, audio and generative families
    "lstm_gluon": Family("lstm_gluon.py", "lower"),
    "lstm_bucketing": Family("lstm_bucketing.py", "lower"),
    "transformer": Family("transformer.py", seeds=3),
    "gnmt": Family("gnmt.py", seeds=3),
    "convs2s": Family("convs2s.py", seeds=3),
    "speech_recurrent": Family("speech.py recurrent", "lower"),
    "speech_convolutional": Family("speech.py convolutional", "lower"),
    "tacotron": Family("tacotron.py", "lower"),
    "wavenet": Family("wavenet.py", "lower"),
    "sentiment": Family("sentiment.py"),
    "progressive_gan": Family("progressive_gan.py", "lower"),
    "inpainting": Family("inpainting.py"),
    "bert_pretraining": Family("bert.py pretrain", "lower"),
    "bert_finetuning": Family("bert.py finetune"),
}
