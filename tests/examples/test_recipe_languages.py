"""What the recipes of language and speech stand on: texts, metrics, and networks that do not see what they predict."""

import mxnet as mx
import numpy as np
import pytest


def test_a_package_that_is_not_there_is_named(recipe, monkeypatch, tmp_path):
    data = recipe("data")
    monkeypatch.setattr(data, "CACHE", tmp_path)
    with pytest.raises(data.DataMissingError, match="no-such-package"):
        data._fetched("no-such-package", ["false"])
    assert list(tmp_path.iterdir()) == []


def test_words_and_their_numbers(recipe):
    data = recipe("data")
    text = data.words('Delete "%(name)s" now?')
    assert text == ["delete", "%(name)s", "now", "?"]
    known = data.Vocabulary([text, ["now"]], size=6)
    assert known.tokens[4:] == ["now", "%(name)s"]
    assert known.padded([text], 5).tolist() == [[data.UNKNOWN, 5, 4, data.UNKNOWN, data.PAD]]


def test_bleu(recipe):
    bleu = recipe("translation").bleu
    wanted = [["a", "page", "of", "the", "site"], ["add", "a", "new", "user", "now"]]
    assert bleu(wanted, wanted) == pytest.approx(100)
    assert bleu([["a", "page", "of", "the", "pages"], wanted[1]], wanted) < 90
    assert bleu([side[:3] for side in wanted], wanted) == pytest.approx(100 * np.exp(1 - 5 / 3))  # too short
    assert bleu([["x"] * 5] * 2, wanted) < 1


def test_letter_error_rate_and_best_path(recipe):
    speech = recipe("speech")
    assert speech.error_rate(["may", "one"], ["may", "one"]) == 0
    assert speech.error_rate(["my", "onne"], ["may", "one"]) == pytest.approx(100 * 2 / 6)
    path = ["b", "b", None, "b", "e"]
    ids = [len(speech.LETTERS) if letter is None else speech.LETTERS.index(letter) for letter in path]
    assert speech.best_path(np.eye(len(speech.LETTERS) + 1)[ids]) == "bbe"


@pytest.mark.parametrize(
    ("script", "network"), [("transformer", "Transformer"), ("gnmt", "GNMT"), ("convs2s", "ConvS2S")]
)
def test_a_translator_does_not_see_the_words_to_come(recipe, script, network):
    length = recipe("translation").LENGTH
    net = getattr(recipe(script), network)(20, 20)
    net.initialize(mx.init.Normal(0.3))
    source, target = np.random.RandomState(0).randint(4, 20, (2, 1, length)).astype("float32")
    changed = target.copy()
    changed[0, 6:] = 5
    before, after = (net(mx.nd.array(source), mx.nd.array(t)).asnumpy() for t in (target, changed))
    np.testing.assert_allclose(before[0, :6], after[0, :6], atol=1e-5)
    assert np.abs(before[0, 6:] - after[0, 6:]).max() > 1e-2


def test_wavenet_sees_the_past_only(recipe):
    wavenet = recipe("wavenet")
    net = wavenet.WaveNet()
    net.initialize(mx.init.Xavier())
    samples = np.random.RandomState(0).randint(0, 256, (1, wavenet.PAST + 40)).astype("float32")
    changed = samples.copy()
    changed[0, wavenet.PAST + 20] = 255 - changed[0, wavenet.PAST + 20]
    before, after = (net(mx.nd.array(x)).asnumpy()[0] for x in (samples, changed))
    assert before.shape == (40, 256)
    off = np.abs(before - after).max(axis=1)
    assert off[:20].max() < 1e-6 < off[20]


def test_inpainting_does_not_see_into_holes(recipe):
    inpainting = recipe("inpainting")
    net = inpainting.Inpainter()
    net.initialize(mx.init.Xavier())
    random = np.random.RandomState(0)
    pictures, masks = inpainting.samples(random, [random.rand(3, 80, 80).astype("float32")], 2)
    assert 0.3 < masks.mean() < 1
    noise = pictures + (1 - masks) * random.normal(0, 5, pictures.shape).astype("float32")
    before, after = (net(mx.nd.array(x), mx.nd.array(masks)).asnumpy() for x in (pictures, noise))
    np.testing.assert_allclose(before, after, atol=1e-5)


def test_hidden_words_are_hidden(recipe):
    pairs = recipe("pairs")
    halves = [(list(range(10, 20)), list(range(20, 30))), ([40] * 10, [41] * 10)]
    ids, types, length, places, hidden, follows = pairs.masked(halves, 0, np.random.RandomState(1))
    assert (ids[places] == pairs.MASK).all()
    assert ((hidden >= 10) & (hidden < 50)).all()
    assert len(set(places)) == pairs.HIDDEN_WORDS
    assert length == 23
    assert (ids[length:] == 0).all()
    assert types[:12].sum() == 0
    assert follows == float(41 not in ids)


def test_warping_forgives_tempo_alone(recipe):
    warped = recipe("tacotron").warped
    sound = np.random.RandomState(0).rand(10, 4)
    assert warped(np.repeat(sound, 2, axis=0), sound) == pytest.approx(0)
    assert warped(sound + 1, sound) > 0.3
