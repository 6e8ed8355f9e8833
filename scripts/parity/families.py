"""Every family of networks that `scripts/dev.py parity` trains, with the command that trains it."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A row of the table.

    ``recipe``: a file of examples/recipes with its arguments. ``better``: the "higher" or "lower" values of its metric.
    ``seeds``: five, or three where a run takes more than a minute of one core.
    ``tolerance``: means so close are equal whatever their errors, in the metric's own unit (points where it has them).
    ``ablations``: options of runs without a safeguard, float16, to show what it is for.
    ``probes``: options of runs that look into a miss, float16, each with what it tells.
    """

    recipe: str
    better: str = "higher"
    seeds: int = 5
    tolerance: float = 0.2
    ablations: tuple[str, ...] = ()
    probes: tuple[tuple[str, str], ...] = ()


WITHOUT = ("--loss-scale none", "--no-masters")
NO_SKIPS = ("--loss-scale 1024", "no step is lost while the scale finds its level: what is left is the arithmetic")
GAN = ("--loss-scale 128", "no step is lost, and it is better than float32 all the same. Why was not found")
RCNN = ("--loss-scale 1024", "no step is lost, and on these seeds it is no better than float32")

FAMILIES = {
    "alexnet": Family("classify.py alexnet", ablations=WITHOUT),
    "vgg16": Family("classify.py vgg16", ablations=WITHOUT),
    "googlenet": Family("classify.py googlenet"),
    "inceptionv2": Family("classify.py inceptionv2"),
    "inceptionv3": Family("classify.py inceptionv3"),
    "resnet50": Family("classify.py resnet50"),
    "resnext50": Family("classify.py resnext50"),
    "faster_rcnn": Family("rcnn.py faster_rcnn", probes=(RCNN,)),
    "mask_rcnn": Family("rcnn.py mask_rcnn"),
    "ssd": Family("ssd.py", ablations=WITHOUT),
    # 0.01: of PSPNet's 473x473 pixels each has a gradient of the mean that is a hundredth of that of these 48x48.
    "segmentation": Family("segmentation.py", ablations=(*WITHOUT, "--loss-scale 0.01")),
    "resnet50_symbolic": Family("classify_symbolic.py"),
    "ssd_symbolic": Family("ssd_symbolic.py"),
    # Language, speech, audio and generative families
    # Tolerances that are not points: of perplexity (about 1 %), dB and bits per sample.
    "lstm_gluon": Family("lstm_gluon.py", "lower", tolerance=1.0, ablations=("--no-masters",)),
    "lstm_bucketing": Family("lstm_bucketing.py", "lower", tolerance=1.0),
    "transformer": Family("transformer.py", seeds=3, probes=(NO_SKIPS,)),
    "gnmt": Family("gnmt.py", seeds=3),
    "convs2s": Family("convs2s.py", seeds=3),
    "speech_recurrent": Family("speech.py recurrent", "lower", ablations=("--no-masters",)),
    "speech_convolutional": Family("speech.py convolutional", "lower"),
    "tacotron": Family("tacotron.py", "lower", tolerance=0.1),
    "wavenet": Family("wavenet.py", "lower", seeds=3, tolerance=0.02),
    "sentiment": Family("sentiment.py", seeds=3),
    "progressive_gan": Family("progressive_gan.py", "lower", probes=(GAN,)),
    "inpainting": Family("inpainting.py", tolerance=0.1),
    "bert_pretraining": Family("bert.py pretraining", "lower", tolerance=2.0),
    "bert_finetuning": Family("bert.py finetuning"),
}
