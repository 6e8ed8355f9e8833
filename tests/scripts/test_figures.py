"""A figure has one source, a file of scripts/lab/results: generated pages are made of it, and other pages say the same.

``SAID`` has the sentences of other pages whose figures a JSON file holds, with the figures computed from it. A link
whose text is a number, as in ``[1.68](model-benchmarks.md#training)``, must lead to a section that has the number.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import geometric_mean, median

import pytest
from bench import inference
from gpu.sim import drawn
from parity import run as parity_run
from support.families import FAMILIES
from support.results import DOCS, FOLDER, ROOT, read
from sweep import fusion, quantized, simulated_gpu
from sweep.gpu_graphs import SAFE_SUMS

from pages import benchmarks, gpu_graphs, kernels, models, rules, workarounds  # isort: skip
from pages import parity as parity_page  # isort: skip

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
GENERATED = ("gpu-graphs", "kernels", "model-benchmarks", "models", "parity", "rules", "workarounds")
LINES = "docs/measurements.md"
INFERENCE = DOCS / "inference.md"
WITHOUT = "docs/without-a-gpu.md"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
           "thirteen", "fourteen", "fifteen")  # fmt: skip


def one_line(text):
    """The text without line breaks, emphasis and the targets of links."""
    return " ".join(re.sub(r"\]\([^)]*\)", "", text).replace("*", "").replace("[", "").split())


# -- Generated pages --------------------------------------------------------------------------------


def parity_results():
    results = {family: parity_run.load(parity_run.RESULTS, family) for family in FAMILIES}
    return results, {dtype: parity_page.judgements(results, dtype) for dtype in parity_run.DTYPES[1:]}


MADE = {
    "gpu-graphs": lambda: gpu_graphs.page(read(FOLDER / "gpu-graphs.json"), read(FOLDER / "gpu-model.json")),
    "kernels": lambda: kernels.render(read(FOLDER / "kernels.json")),
    "model-benchmarks": lambda: benchmarks.page(read(FOLDER / "model-benchmarks.json")),
    "models": lambda: models.page(read(FOLDER / "models.json")),
    "parity": lambda: parity_page.page(*parity_results()),
}


@pytest.mark.parametrize("name", MADE)
def test_a_generated_page_is_that_of_its_results(name):
    pytest.importorskip("gluoncv")
    command = f"python scripts/dev.py pages {name.replace('model-', '')}"
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == MADE[name](), command


@pytest.mark.parametrize(("module", "name"), [(rules, "rules"), (workarounds, "workarounds")])
def test_generated_pages_are_those_of_the_tables(module, name):
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == module.render(), f"python scripts/dev.py pages {name}"


# -- What other pages say ---------------------------------------------------------------------------


def of_benchmarks():
    results = list(read(FOLDER / "model-benchmarks.json").values())

    def rows(task, threads=1, dtype="bfloat16"):
        return [r for r in results if (r["task"], r["threads"], r["dtype"]) == (task, threads, dtype)]

    def mean(found, variant):
        return f"{geometric_mean(median(r) for each in found if (r := benchmarks.ratios(each, variant))):.2f}"

    def peak(title, task="training"):
        (found,) = (r["variants"] for r in rows(task) if r["title"] == title)
        return f"{found['rules']['peak'] / found['float32']['peak']:.2f}"

    training, parallel, inference = rows("training"), rows("training", 2), rows("inference")
    shared = [r for r in training if benchmarks.ratios(r, "contrib.amp")]
    count, same, doubled = (NUMBERS[len(each)] for each in (training, shared, parallel))
    resnet = f"{median(benchmarks.ratios(next(r for r in training if r['title'] == 'ResNet-50'), 'rules')):.2f}"
    yield "docs/choosing-a-dtype.md", f"(now at {resnet})"
    (emulated,) = (r for r in rows("training", dtype="float16") if r["title"] == "ResNet-50")
    as_long = f"{median(1 / ratio for ratio in benchmarks.ratios(emulated, 'rules')):.2f}"
    rules, tuned = mean(training, "rules"), mean(training, "tuned")
    ours, theirs = mean(shared, "rules"), mean(shared, "contrib.amp")
    yield "README.md", f"training is {rules} times as fast as in FP32 (geometric mean of {count} networks, on"
    yield "README.md", f"in the {same} networks that both train | {ours} times FP32's speed | {theirs} times |"
    yield LINES, f"{rules} times by the rules, in the geometric mean of {count} networks."
    yield (
        "docs/measurements.md",
        f"the {same} of them that `mxnet.contrib.amp` can train it reaches {theirs}, and mxmp {ours}.",
    )
    yield LINES, f"reach {tuned} times on the same {count} networks,"
    yield LINES, f"and {mean(parallel, 'tuned')} with two threads, on {doubled}."
    yield (
        "docs/measurements.md",
        f"is {mean(inference, 'rules')} times as fast by the rules and {mean(inference, 'tuned')} tuned",
    )
    yield LINES, f"a ResNet-50 step takes {as_long} times as long"
    yield "docs/emulated-float16.md", f"a ResNet-50 step takes {as_long} times as long as in FP32"
    yield "docs/benchmarks.md", f"BERT-base takes {peak('BERT-base, 12 layers')} of FP32's memory"
    lstm, alexnet = peak("LSTM language model"), peak("AlexNet")
    yield "docs/when-it-does-not-work.md", f"an LSTM language model {lstm} times, AlexNet {alexnet} times"


def of_parity():
    results, found = parity_results()
    kinds = [verdict.kind for each in found.values() for verdict in each.values()]
    worse = sum(verdict.worse for each in found.values() for verdict in each.values())
    pairs, equal, undecided = len(kinds), kinds.count("equivalent"), kinds.count("undecided")
    better = kinds.count("different") + kinds.count("diverged") - worse
    assert pairs == 2 * len(FAMILIES)
    assert better == 0, "README has no word for it"
    yield "README.md", f"networks of {len(FAMILIES)} families were trained"
    none = f"{worse} are" if worse else "none is"
    yield (
        "README.md",
        f"Of these {pairs} comparisons with FP32, {equal} are equivalent (within margins that were set before), {none} "
        f"worse, and {undecided} need more seeds for a verdict",
    )
    yield "docs/README.md", f"{equal} of {pairs} comparisons of float16 and bfloat16 with FP32 are equivalent"
    yield LINES, f"{len(FAMILIES)} families of networks were trained"
    yield (
        LINES,
        f"Of these {pairs} comparisons with FP32, {equal} are equivalent, {none} worse, and {undecided} need more",
    )
    lost = parity_run.judged(results["segmentation"], "float16", "--loss-scale 0.01").difference
    yield LINES, f"segmentation loses {abs(lost):.2f} points of mIoU in float16"
    errors = parity_run.judged(results["speech_recurrent"], "float16", "--no-masters").difference
    yield LINES, f"speech recognition makes {abs(errors):.2f} points more letter errors"
    large = parity_page.large_runs()
    values = {(name, run["dtype"], run["loss_scale"] == "none"): run["value"] for name in large for run in large[name]}
    segmented = [f"{values['segmentation_large', 'float16', unscaled]:.2f}" for unscaled in (True, False)]
    yield "docs/loss-scaling.md", f"ends at {segmented[0]} % mIoU without a loss scale"
    yield "docs/loss-scaling.md", f"and at {segmented[1]} with one"
    words = [f"{values['language_large', 'float16', unscaled]:.2f}" for unscaled in (True, False)]
    fp32 = next(run["value"] for run in large["language_large"] if run["dtype"] == "float32")
    yield (
        "docs/loss-scaling.md",
        f"a perplexity of {words[0]} without and {words[1]} with a loss scale; FP32 ends at {fp32:.2f}.",
    )


def of_gpu_graphs():
    results = read(FOLDER / "gpu-graphs.json")
    done = gpu_graphs.complete(gpu_graphs.recorded(results))
    rows = {row[0]: row[1:] for row in gpu_graphs.summary(gpu_graphs.recorded(results))}
    (_, amp, ours, *_), (_, amp_cast, our_cast, *_) = rows["peak memory, of FP32's"], rows["GB cast"]
    yield (
        "docs/measurements.md",
        f"Over {len(done)} networks the median peak memory of a training step is {ours} of FP32's",
    )
    yield (
        WITHOUT,
        f"Median peak memory of a training step is {ours} of FP32's, as recorded over {len(done)} networks.",
    )
    yield LINES, f"and {amp} by `mxnet.contrib.amp`; casts move {our_cast} GB and {amp_cast} GB"

    def variants(name):
        found = results[name]["variants"]
        return found["float32"], found["float16"], found["float16-fast"], found[SAFE_SUMS]

    for name in ("faster_rcnn_resnet50_v1b_coco", "inceptionv1_hmdb51"):
        fp32, low, fast = (each["launches"] for each in variants(name)[:3])
        yield "docs/policies.md", f"`{name}` from {low} to {fast} (FP32: {fp32})"
    for name in ("bert_12_768_12", "roberta_12_768_12", "distilbert_6_768_12"):
        fp32, low, _, safe = variants(name)
        sentences = results[name]["inputs"][0][0]
        yield "docs/choosing-a-dtype.md", f"| `{name}`, {sentences} sentences | not set | either | {cells(low, fp32)} |"
        yield "docs/choosing-a-dtype.md", f"| | set | `float16-fast` | {cells(safe, fp32)} |"
    fp32, low, *_ = variants("resnet50_v1b")
    steps = f"launches {low['step_launches']} kernels, its check for overflow included, and {fp32['step_launches']} by"
    yield "docs/imagenet-on-gpus.md", f"a step of ResNet-50 {steps} `gluon.Trainer`"
    elmo = [
        each for name, each in results.items() if name.startswith("elmo") and "launches" in each["variants"]["float16"]
    ]
    share = {f"{e['variants']['float16']['launches'] / e['variants']['float32']['launches']:.1f}" for e in elmo}
    assert len(share) == 1
    yield "docs/gpu-graphs.md", f"{share.pop()} of FP32's launches"


def cells(figures, fp32):
    share, cast = (f"{figures[key] / by:.2f}" for key, by in (("peak_bytes", fp32["peak_bytes"]), ("bytes_cast", 1e9)))
    return f"{share} | {figures['launches']}, {figures['launches'] / fp32['launches']:.2f} | {cast}"


def of_the_model_of_a_gpu():
    published = read(FOLDER / "gpu-model.json")["published"]
    errors = [each["of published"] for each in published if not each["fitted"]]
    yield WITHOUT, f"gives {min(errors):.2f} to {max(errors):.2f} of {len(errors)} others that were published"
    networks = gpu_graphs.recorded(read(FOLDER / "gpu-graphs.json"))
    speeds = [gpu_graphs.speedups(networks, "float16", gpu) for gpu in ("v100", "a100")]
    fast = "{:.1f} times FP32's speed on a V100 and {:.1f} on an A100".format(*map(median, speeds))
    yield WITHOUT, f"has float16 at {fast}, in the median of {len(speeds[0])} networks"


def of_models():
    measured = models.measured(read(FOLDER / "models.json"))
    passing = [sum(bool(models.holds(r, dtype)) for r in measured.values()) for dtype in models.DTYPES]
    run = [sum("outputs_db" in r.get(f"{d}.mxmp", {}) for r in measured.values()) for d in models.DTYPES]
    ran, exact = (f"{found[0]} in float16 and {found[1]} in bfloat16" for found in (run, passing))
    all_pass = {*run, *passing} == {len(measured)}
    some = f"Of {len(measured)} models {ran} run, and {exact} are as precise as perfect kernels allow"
    both = f"All {len(measured)} models run in float16 and in bfloat16, and are as precise as perfect kernels allow"
    yield LINES, both if all_pass else some


def of_inference():
    found = read(FOLDER / "inference.json")
    served = max(each["served"] for name, each in found.items() if name.startswith("resnet50_v1b"))
    yield LINES, f"ResNet-50 predicts {served:.2f} times as fast"


def of_simulated_gpu():
    found = read(FOLDER / "simulated-gpu.json")
    assert list(found) == list(simulated_gpu.RUNS)
    assert {len(epochs) for epochs in found.values()} == {10}
    accuracy = {name: [f"{100 * each['top1']:.2f}" for each in epochs] for name, epochs in found.items()}
    last = {name: (accuracy[name][-1], f"{epochs[-1]['train_loss'][-1]:.3f}") for name, epochs in found.items()}
    for title, device in (("CPU, float16 emulated", "CPU"), ("simulated GPU", "GPU")):
        cells = [cell for dtype in ("float32", "float16") for cell in last[f"{device} {dtype}"]]
        yield WITHOUT, f"| {title} | {' | '.join(cells)} | {found[f'{device} float16'][-1]['skipped_steps']} |"
    shown = (1, 2, 3, 4, 5, 6, 8, 10)
    for title, name in zip(TITLES, simulated_gpu.RUNS):
        yield "docs/choosing-a-dtype.md", f"| {title} | {' | '.join(accuracy[name][epoch - 1] for epoch in shown)} |"
    yield WITHOUT, f"in % of 360 digits, of which one is {100 / 360:.2f} %"
    low = [found[f"{device} float16"] for device in ("CPU", "GPU")]
    assert {(each[0]["skipped_steps"], each[-1]["skipped_steps"], each[-1]["loss_scale"]) for each in low} == {
        (5, 5, 2048)
    }


def of_drawn_graphs():
    found = read(ROOT / "scripts/gpu/sim/drawn.json")
    assert set(found) == {"graphs", "agrees", *drawn.EXPLAINED}  # none differs or fails
    graphs, agree = found["graphs"], found["agrees"]
    ill, rounded, ends = (len(found[reason]) for reason in drawn.EXPLAINED)
    assert graphs == agree + ill + rounded + ends
    table, page = "scripts/gpu/sim/README.md", "docs/emulated-float16.md"
    yield table, f"Of {graphs:,} drawn graphs of about ten operators"
    yield table, f"| {agree:,} | agree to two units"
    yield table, f"| {ill:,} | do not, and change"
    yield table, f"| {rounded} | do not, and change within a factor of four as much where the gradients"
    yield table, f"| {ends} | end their process on the CPU, in plain FP32 too"
    yield page, f"of {graphs:,} graphs {agree:,} agree to two units in the last place, {ill:,} are so ill-conditioned"
    yield page, f"{rounded} show a rounding that a GPU has more"
    yield page, f"and {ends} end their process, in plain FP32 too"


TITLES = ("FP32, CPU", "FP32, CPU, without oneDNN", "FP32, simulated GPU", "float16, CPU, emulated",
          "float16, simulated GPU")  # fmt: skip


def of_trainer_steps():
    """The page itself is the source: no file has these."""
    text = section((DOCS / "benchmarks.md").read_text(encoding="utf-8"), "the-step-on-the-host")
    amd, intel = text.split("On two cores of an Intel")

    def span(text, optimizer, column=4):
        rows = [row for row in text.splitlines() if " ms | " in row and row.count("|") == 7]
        cells = [[cell.strip() for cell in row.split("|")] for row in rows]
        ratios = [float(each[column].split()[0]) for each in cells if each[2] == optimizer]
        assert len(ratios) == 5
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    sgd, adam = span(amd, "SGD with momentum"), span(amd, "Adam")
    yield LINES, f"takes {sgd} of `gluon.Trainer`'s time with SGD, and {adam} with Adam."
    one, two = (span(intel, "Adam", column) for column in (4, 6))
    yield LINES, f"Adam's step takes {one} with one thread, and {two} with two."


SAID = (
    *(of_trainer_steps, of_benchmarks, of_parity, of_gpu_graphs, of_the_model_of_a_gpu, of_models, of_inference),
    of_simulated_gpu,
    of_drawn_graphs,
)


@pytest.mark.parametrize("source", SAID, ids=lambda source: source.__name__)
def test_figures_on_other_pages_are_those_of_the_results(source):
    wrong = [(page, text) for page, text in source() if text not in one_line((ROOT / page).read_text(encoding="utf-8"))]
    assert wrong == []


@pytest.mark.parametrize("name", ["README.md", "docs/without-a-gpu.md", "docs/measurements.md"])
def test_every_decimal_figure_of_a_summary_is_compared(name):
    compared = " ".join(text for source in SAID for page, text in source() if page == name)
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    versions = r"(MXNet|mxnet|mxnet-cu112|Python|License|until|capability) \d[\d.]*( to \d[\d.]*)?"
    text = re.sub(rf"{versions}|`[^`]*`", "", text)
    assert [each for each in re.findall(r"\d+\.\d+", text) if each not in compared] == []


def test_the_table_of_calibration_batches_is_that_of_the_measurements():
    text = section(INFERENCE.read_text(encoding="utf-8"), "how-many-batches-calibrate")
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert table == quantized.render(read(quantized.RESULTS)), "python scripts/dev.py sweep quantized"


def test_the_counts_of_fused_models_are_those_of_the_sweep():
    done = [found for found in read(FOLDER / "fusion.json").values() if "fused" in found]
    same = sum(found["fused"] >= fusion.SAME for found in done)
    amplify = [found["fused to float64"] - found["plain to float64"] for found in done if "fused to float64" in found]
    near = sum(difference >= -fusion.NEAR for difference in amplify)
    modules = [found["module"] - found["casts"] for found in done if "module" in found]
    text = " ".join(section(INFERENCE.read_text(encoding="utf-8"), "mxnets-fusion-and-where-it-is-wrong").split())
    assert f"Of {len(done)} models, {same} give" in text
    assert f"The other {near} amplify" in text
    assert same + near == len(done)
    assert f"could be tried on {len(modules)}." in text
    assert f"more than 3 dB on {sum(loss < -fusion.MARGIN for loss in modules)}, and nothing in the median" in text
    assert round(sorted(modules)[len(modules) // 2], 1) == 0.0


def test_the_times_on_the_page_of_inference_are_those_that_were_measured():
    found = read(FOLDER / "inference.json")
    text = INFERENCE.read_text(encoding="utf-8")
    assert found
    for line in (*inference.HEAD, *(inference.row(*each) for each in found.items())):
        assert f"\n{line}\n" in text


# -- Links with a number ----------------------------------------------------------------------------

FIGURE = re.compile(r"\[([+-]?[\d.,]*\d[\d.,]*(?: (?:times|models|are)[^\]]*)?)\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def figures():
    for page in PAGES:
        for label, target, anchor in FIGURE.findall(page.read_text(encoding="utf-8")):
            if target.endswith(".md") or not target:
                yield pytest.param(page, label, target, anchor, id=f"{page.stem}-{label}-{target}")


@pytest.mark.parametrize(("page", "label", "target", "anchor"), list(figures()))
def test_a_figure_stands_in_the_section_that_it_links_to(page, label, target, anchor):
    text = (page.parent / target).resolve().read_text(encoding="utf-8") if target else page.read_text(encoding="utf-8")
    found = one_line(section(text, anchor) if anchor else text)
    number = re.match(r"[+-]?[\d.,]*\d", label)[0]
    assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", found)


def section(text, anchor):
    """The text from a heading to the next one of its level or above."""
    hashes, taken = "", []
    for line in text.splitlines():
        found = re.match(r"(#+) (.+)", line)
        if found and taken and len(found[1]) <= len(hashes):
            break
        if found and re.sub(r"[^\w\- ]", "", found[2].lower()).replace(" ", "-") == anchor:
            hashes = found[1]
        if hashes:
            taken.append(line)
    assert taken, anchor
    return "\n".join(taken)


def test_the_pages_that_are_generated_are_all_there():
    assert all((DOCS / f"{name}.md").exists() for name in GENERATED)
    assert {path.stem for path in (Path(parity_page.__file__).parent).glob("*.md")} == {
        name.replace("model-", "").replace("-", "_") for name in GENERATED
    }
