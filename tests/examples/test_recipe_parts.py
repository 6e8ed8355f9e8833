"""What the recipes of vision stand on: the digits, the canvases, the narrowed networks and the measures."""

import mxnet as mx
import numpy as np
import pytest


def test_digits_to_test_on_are_not_trained_on(recipe):
    images, labels, held, truth = recipe("digits").split(8)
    assert len(images) + len(held) == 1797
    assert (len(labels), len(truth)) == (len(images), len(held))
    assert np.bincount(truth.astype(int)).min() > 50
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in held}


def test_boxes_and_masks_are_where_the_digits_are(recipe):
    data = recipe("digits").canvases(30, held_out=True, seed=3, size=48)
    assert data.images.shape == (30, 3, 48, 48)
    for image, boxes, ids, masks in zip(*data):
        for box, digit, mask in zip(boxes, ids, masks):
            assert (digit >= 0) == (box >= 0).all() == mask.any()
            if digit >= 0:
                rows, columns = np.nonzero(mask)
                assert list(box) == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert image[0][mask > 0].min() > 2 * 0.3 - 1  # above the noise
        assert masks.sum(axis=0).max() <= 1
    assert len(np.unique(data.ids)) == 11


def test_canvases_are_those_of_their_seed(recipe):
    canvases = recipe("digits").canvases
    first, again, other = (canvases(4, False, seed=seed).images for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("name", ["googlenet", "resnext50", "inceptionv2"])
def test_a_narrowed_network_has_all_its_layers(recipe, name):
    classify = recipe("classify")
    network = classify.NETWORKS[name]
    net = network.make()
    whole, thin = net(mx.sym.var("data")), classify.narrowed(net, network.narrower)
    assert thin.list_arguments() == whole.list_arguments()
    shape = (1, 3, network.size, network.size)
    shapes = dict(zip(thin.list_arguments(), thin.infer_shape(data=shape)[0]))
    widths = {n: int(a["num_filter"]) for n, a in whole.attr_dict().items() if "num_filter" in a}
    assert len(widths) > 50
    for layer, width in widths.items():
        assert shapes[layer.replace("_fwd", "_weight")][0] == width // network.narrower
    assert thin.infer_shape(data=shape)[1] == [(1, 10)]


def test_mean_overlap(recipe):
    mean_overlap = recipe("segmentation").mean_overlap
    truth = np.array([[0, 0, 1, 1]])
    assert mean_overlap(truth, truth) == 100
    assert mean_overlap(np.array([[0, 1, 1, 1]]), truth) == pytest.approx(100 * (1 / 2 + 2 / 3) / 2)
    assert mean_overlap(np.zeros_like(truth), truth) == pytest.approx(25)


def test_mask_overlaps(recipe):
    rcnn = recipe("rcnn")
    truth = np.zeros((2, rcnn.SIZE, rcnn.SIZE))
    truth[0, 10:20, 30:40] = 1
    masks = np.ones((2, 14, 14))
    boxes = np.array([[30, 10, 40, 20], [-1, -1, -1, -1]])
    assert rcnn.mask_overlaps(boxes, masks, truth) == [1]
    assert rcnn.mask_overlaps(np.add(boxes, [0, 0, 10, 0]), masks, truth) == [0.5]
    assert rcnn.mask_overlaps(boxes, 0 * masks, truth) == [0]
