"""Every family of networks that `scripts/dev.py parity` trains, with the command that trains it."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A line of the table.

    ``recipe``: a file of examples/recipes with its arguments. ``seeds``: of float32 and float16. 12, or 17 where the
    runs are short, or more where the spread of the differences over the first seeds asked for more; their mean had no
    part in it.
    ``ablations``: options of runs without a safeguard, float16, to show what it is for.
    """

    recipe: str
    seeds: int
    ablations: tuple[str, ...] = ()


WITHOUT = ("--loss-scale none", "--no-masters")

FAMILIES = {
    "alexnet": Family("classify.py alexnet", 17, ablations=WITHOUT),
    "vgg16": Family("classify.py vgg16", 17, ablations=WITHOUT),
    "googlenet": Family("classify.py googlenet", 12),
    "inceptionv2": Family("classify.py inceptionv2", 12),
    "inceptionv3": Family("classify.py inceptionv3", 12),
    "resnet50": Family("classify.py resnet50", 12),
    "resnext50": Family("classify.py resnext50", 12),
    "faster_rcnn": Family("rcnn.py faster_rcnn", 16),
    "mask_rcnn": Family("rcnn.py mask_rcnn", 12),
    "ssd": Family("ssd.py", 17, ablations=WITHOUT),
    # 0.01: of PSPNet's 473x473 pixels each has a gradient of the mean that is a hundredth of that of these 48x48.
    "segmentation": Family("segmentation.py", 17, ablations=(*WITHOUT, "--loss-scale 0.01")),
    "resnet50_symbolic": Family("classify_symbolic.py", 14),
    "ssd_symbolic": Family("ssd_symbolic.py", 17),
    # Language, speech, audio and generative families
    "lstm_gluon": Family("lstm_gluon.py", 17, ablations=("--no-masters",)),
    "lstm_bucketing": Family("lstm_bucketing.py", 12),
    "transformer": Family("transformer.py", 19),
    "gnmt": Family("gnmt.py", 12),
    "convs2s": Family("convs2s.py", 12),
    "speech_recurrent": Family("speech.py recurrent", 17, ablations=("--no-masters",)),
    "speech_convolutional": Family("speech.py convolutional", 17),
    "tacotron": Family("tacotron.py", 17),
    "wavenet": Family("wavenet.py", 17),
    "sentiment": Family("sentiment.py", 32),
    "progressive_gan": Family("progressive_gan.py", 17),
    "inpainting": Family("inpainting.py", 22),
    "bert_pretraining": Family("bert.py pretraining", 17),
    "bert_finetuning": Family("bert.py finetuning", 13),
}
