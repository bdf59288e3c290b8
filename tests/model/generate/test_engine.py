"""The generator: whatever shares a batch, every request gets the tokens that it would get alone."""

import random
from dataclasses import replace

import pytest
import torch

from bessemer.errors import UserError
from bessemer.model.generate import Generator, ModelDrafter, NgramDrafter, Request, Sampling
from bessemer.model.generate.compiled import CompiledDecoding
from bessemer.spec.shape import Mamba, Mla

GREEDY = Sampling(temperature=0)
SHAPES = {
    "grouped": {},
    "windows": {"windows": (5, 0)},
    "global": {"windows": (5, 0), "global_tokens": 2},
    "learned": {"positions": "learned", "max_positions": 128},
    "alibi": {"positions": "alibi", "kv_heads": 4},
    "mamba": {"mixers": ("mamba", "attention"), "mamba": Mamba(heads=4, head_dim=12, state=8, chunk=8)},
    "latent": {"kv_heads": 4, "mla": Mla(kv_rank=10, nope_dim=6, rope_dim=4, value_dim=8)},
}


FAST = ("grouped", "mamba", "latent")  # the others are packed into one row below


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHAPES])
def model(request, shape_of, build_random):
    return build_random(shape_of(**SHAPES[request.param])).eval()


def requests(count, seed=0, longest=40, answer=30, **fields):
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(37) for _ in range(draw.randint(1, longest))], draw.randint(1, answer),
            Sampling(0 if i % 2 else 0.9, seed=i, top_p=0.95), **fields,
        )
        for i in range(count)
    ]  # fmt: skip


def alone(model, request):
    ((done,),) = Generator(model, slots=1, max_length=128).run([request])
    return done


def test_rows_that_come_and_go_get_the_tokens_of_each_alone(model):
    asked = requests(14, top_logprobs=2)
    generator = Generator(model, slots=4, max_length=128)
    for request, (done,) in zip(asked, generator.run(asked), strict=True):
        assert done.tokens == alone(model, request).tokens
        assert len(done.tokens) == request.max_tokens and done.reason == "length"
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([[*request.prompt, *done.tokens]])))[0]
        logprobs = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9)
        for top, row in zip(done.top, logprobs, strict=True):
            assert list(top.values()) == pytest.approx(row.topk(2).values.tolist(), abs=1e-9)
    assert generator.forwards < sum(request.max_tokens for request in asked)


def test_logprobs_in_float32(shape_of, build_random):
    model = build_random(shape_of()).float().eval()
    for request, (completion,) in zip(
        work := requests(8, top_logprobs=0), Generator(model, 4, 128).run(work), strict=True
    ):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([[*request.prompt, *completion.tokens]])))[0]
        expected = logits.log_softmax(-1)[len(request.prompt) - 1 : -1].gather(
            1, torch.tensor(completion.tokens)[:, None]
        )
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected[:, 0], rtol=0, atol=5e-5)


def test_prompts_packed_into_one_row(shape_of, build_random):
    """As a GPU reads them."""
    for name in ("grouped", "windows", "learned", "alibi"):
        model = build_random(shape_of(**SHAPES[name])).eval()
        generator, work = Generator(model, slots=4, max_length=128), requests(9, seed=7)
        generator.runner.packs = True
        tokens = [completion.tokens for (completion,) in generator.run(work)]
        assert tokens == [alone(model, request).tokens for request in work]


@pytest.mark.parametrize("name", ["grouped", "windows", "global", "learned", "alibi", "latent"])
def test_prompts_of_one_length_are_read_together(name, shape_of, build_random, monkeypatch):
    model, calls = build_random(shape_of(**SHAPES[name])).eval(), []
    generator = Generator(model, slots=8, max_length=128)
    lengths = [5, 9, 5, 9, 5, 1]
    work = [
        Request([(3 * i + j) % 37 for j in range(length)], 6, GREEDY, samples=1 + i % 2)
        for i, length in enumerate(lengths)
    ]
    expected = [[done.tokens for done in Generator(model, 1, 128).run([request])[0]] for request in work]
    model.register_forward_hook(lambda module, inputs, output: calls.append(tuple(inputs[0].shape)))
    assert [[done.tokens for done in each] for each in generator.run(work)] == expected
    assert sorted(calls[:3]) == [(1, 1), (2, 9), (3, 5)]  # eight slots: all samples but one at first


COMPILED = {
    "windows": SHAPES["windows"],
    "norms": {"norm_place": "sandwich", "qk_norm": "head"},
    "parallel": {"parallel": "one_norm", "gated": False, "kv_heads": 4},
}


@pytest.mark.parametrize(
    "fields", [{}, *(pytest.param(COMPILED[name], marks=pytest.mark.slow, id=name) for name in COMPILED)]
)
def test_compiled_blocks(fields, shape_of, build_random):
    """As a GPU decodes, traced without a compiler."""
    model, plain = (build_random(shape_of(**fields)).eval() for _ in range(2))
    generator, work = Generator(model, slots=4, max_length=128), requests(7, seed=8)
    runner = generator.runner
    first = CompiledDecoding(model, backend="eager")
    runner.direct, runner.compiled = True, CompiledDecoding(model, backend="eager")
    tokens = [completion.tokens for (completion,) in generator.run(work)]
    assert tokens == [alone(plain, request).tokens for request in work]
    attention = model.blocks[0].attention
    with torch.no_grad():  # weights of a training model change in place, and the joined ones with them
        for module in (model, plain):
            module.blocks[0].attention.key.weight.mul_(1.5)
    assert first.qkv[0][0].data_ptr() == runner.compiled.qkv[0][0].data_ptr() == attention.query.weight.data_ptr()
    torch.testing.assert_close(
        first.qkv[0][0][len(attention.query.weight) :][: len(attention.key.weight)], attention.key.weight
    )
    generator.weights_changed()
    tokens = [completion.tokens for (completion,) in generator.run(work)]
    assert tokens == [alone(plain, request).tokens for request in work]


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_change_between_calls(compiled, shape_of, build_random):
    """By an optimizer step, in place; then by tensors in other memory, from which joined weights are made again."""
    model, work = build_random(shape_of()).eval(), requests(5, seed=9, top_logprobs=0)
    generator = Generator(model, slots=4, max_length=128)
    if compiled:
        generator.runner.direct, generator.runner.compiled = True, CompiledDecoding(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = generator.run(work)
    for change in ("step", "move"):
        if change == "step":
            model(torch.tensor([[1, 2, 3, 4]])).square().sum().backward()
            optimizer.step()
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.9
        generator.weights_changed()
        after, fresh = (g.run(work) for g in (generator, Generator(model, slots=4, max_length=128)))
        assert [x.tokens for (x,) in after] == [x.tokens for (x,) in fresh]
        for (ours,), (theirs,), (old,) in zip(after, fresh, before, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-9) and ours.logprobs != old.logprobs
        before = after


def test_arrivals_in_the_middle_change_nothing(model):
    asked, draw = requests(10, seed=3), random.Random(1)
    generator, results, waiting = Generator(model, slots=3, max_length=128), [], list(asked)
    while waiting or generator.rows or generator.waiting:
        if waiting and draw.random() < 0.4:
            results += generator.submit(waiting.pop(0))
        generator.step()
    assert [done.tokens for done in results] == [alone(model, request).tokens for request in asked]


def test_samples_of_a_prompt_read_it_once_and_differ(model):
    request = Request([3, 1, 4, 1, 5], 12, Sampling(1.0, seed=2), samples=5)
    generator = Generator(model, slots=8, max_length=64)
    (samples,) = generator.run([request])
    assert len({tuple(done.tokens) for done in samples}) > 1
    assert generator.forwards == 12
    assert samples[0].tokens == alone(model, Request([3, 1, 4, 1, 5], 12, Sampling(1.0, seed=2))).tokens


def test_a_prompt_with_a_beginning_that_was_read_before(shape_of, build_random):
    model = build_random(shape_of()).eval()
    generator, read = Generator(model, slots=3, max_length=128), []
    prefill = generator.runner.prefill
    generator.runner.prefill = lambda prompts: (
        read.extend(len(t) - start for _, t, start in prompts) or prefill(prompts)
    )
    common = list(range(30))
    first = generator.run([Request(common, 5, GREEDY)])[0][0]
    turn = [*common, *first.tokens, 7, 8]
    (second,) = generator.run([Request(turn, 5, GREEDY)])[0]
    assert read[0] == 30 and read[1] == 3  # the last answer token was never fed
    assert second.tokens == alone(model, Request(turn, 5, GREEDY)).tokens
    with torch.no_grad():
        model.head_weight.mul_(-1)
    generator.weights_changed()
    (third,) = generator.run([Request(turn, 5, GREEDY)])[0]
    assert read[2] == len(turn) and third.tokens == alone(model, Request(turn, 5, GREEDY)).tokens


def test_stops(shape_of, build_random):
    model = build_random(shape_of()).eval()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"

    def decode(tokens):
        return "".join(letters[token] for token in tokens)

    generator = Generator(model, slots=2, max_length=128, decode=decode)
    (free,) = generator.run([Request([1, 2], 40, Sampling(1.0, seed=1))])[0]
    text = decode(free.tokens)
    (by_id,) = generator.run([Request([1, 2], 40, Sampling(1.0, seed=1), stop_ids=frozenset({free.tokens[9], 99}))])[0]
    assert by_id.reason == "stop" and by_id.stop == free.tokens[9]
    assert by_id.tokens == free.tokens[: free.tokens.index(free.tokens[9])]
    stop = text[5:8]  # over three tokens
    request = Request([1, 2], 40, Sampling(1.0, seed=1), stop_strings=(stop, "never there"))
    (by_text,) = generator.run([request])[0]
    assert by_text.reason == "stop" and by_text.stop == stop and by_text.text == text[: text.index(stop)]
    pieces = list(generator.stream(request))
    assert "".join(pieces) == by_text.text and len(pieces) > 1
    with pytest.raises(UserError, match="decode"):
        Generator(model).submit(request)


def test_limits(shape_of, build_random):
    model = build_random(shape_of()).eval()
    generator = Generator(model, slots=1, max_length=20)
    with pytest.raises(UserError, match="20"):
        generator.submit(Request([1] * 20))
    with pytest.raises(UserError, match="empty"):
        generator.submit(Request([]))
    (cut,) = generator.run([Request([1] * 15, 50, GREEDY)])[0]
    assert len(cut.tokens) == 5 and cut.reason == "length"
    (timed,) = generator.run([Request([1], 10, GREEDY, max_seconds=0.0)])[0]
    assert timed.reason == "time" and len(timed.tokens) == 1
    one, two = generator.submit(Request([1], 10, GREEDY)) + generator.submit(Request([2], 10, GREEDY))
    generator.step()
    generator.cancel(one.request)
    generator.cancel(two.request)
    assert (one.reason, two.reason) == ("cancelled", "cancelled") and not generator.step()


@pytest.mark.parametrize("drafter", ["ngram", "same", "other"])
def test_speculation_changes_no_greedy_token(drafter, shape_of, build_random):
    model = build_random(shape_of()).eval()
    other = build_random(shape_of(layers=1), seed=5).eval()
    asked = [Request(r.prompt, r.max_tokens, GREEDY, top_logprobs=0) for r in requests(8, seed=2)]
    make = {
        "ngram": NgramDrafter,
        "same": lambda: ModelDrafter(model, model),
        "other": lambda: ModelDrafter(other, model),
    }
    generator = Generator(model, slots=3, max_length=128, drafter=make[drafter]())
    plain = Generator(model, slots=3, max_length=128)
    found, expected = ([done for (done,) in g.run(asked)] for g in (generator, plain))
    assert [done.tokens for done in found] == [done.tokens for done in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs[: len(b.logprobs)] == pytest.approx(b.logprobs, abs=1e-9)
    if drafter == "same":
        assert generator.forwards < plain.forwards / 2


def test_a_draft_model_fits_its_generator(shape_of, build_random):
    """Any number of slots, any length, and more guesses than a slot has room for."""
    model = build_random(shape_of()).eval()
    work = [Request([1, 2, 3, i] * 12, 12, GREEDY) for i in range(18)]
    plain = [done.tokens for (done,) in Generator(model, slots=18, max_length=64).run(work)]
    for drafter in (ModelDrafter(model, model), ModelDrafter(model, model, length=40), NgramDrafter(length=60)):
        generator = Generator(model, slots=18, max_length=64, drafter=drafter)
        assert [done.tokens for (done,) in generator.run(work)] == plain
        assert generator.forwards < 12


def test_refusals(shape_of, build_random):
    model = build_random(shape_of()).eval()
    generator = Generator(model, slots=1, max_length=20, decode=str, drafter=NgramDrafter())
    for request, message in (
        (Request([1, 37]), "tokens outside of 0 to 36"),
        (Request([1, -1]), "tokens outside of 0 to 36"),
        (Request([1], stop_strings=("",)), "an empty stop string"),
        (Request([1], sampling=Sampling(presence_penalty=1.0)), "speculative decoding has no penalties"),
    ):
        with pytest.raises(UserError, match=message):
            generator.submit(request)
    assert not generator.step()
    with pytest.raises(UserError, match="0 slots"):
        Generator(model, slots=0)


def test_a_reader_that_leaves_frees_the_slot(shape_of, build_random):
    generator = Generator(build_random(shape_of()).eval(), slots=1, max_length=64, decode=lambda ids: "x" * len(ids))
    pieces = generator.stream(Request([1], 40, GREEDY))
    next(pieces)
    pieces.close()
    assert not generator.rows and not generator.waiting
    assert len("".join(generator.stream(Request([2], 7, GREEDY)))) == 7


class CyclicRemainders:
    """Allows the tokens of one remainder after another: 0 mod 3, 1 mod 3, 2 mod 3, 0 mod 3, ..."""

    def __init__(self):
        self.accepted = []

    def fork(self):
        return type(self)()

    def allowed(self, vocab):
        return torch.arange(vocab) % 3 == len(self.accepted) % 3

    def accept(self, token):
        self.accepted.append(token)


def test_constrained_rows_beside_free_ones(shape_of, build_random):
    """Each sample follows the constraint in a state of its own; rows without one get the tokens of before."""
    model = build_random(shape_of()).eval()
    work = requests(8, seed=3, samples=2)
    limited = [
        replace(request, constraint=CyclicRemainders()) if i % 3 == 0 else request for i, request in enumerate(work)
    ]
    for drafter in (None, NgramDrafter()):
        results = Generator(model, slots=4, max_length=128, drafter=drafter).run(limited)
        for i, (request, samples) in enumerate(zip(work, results, strict=True)):
            for completion in samples:
                if i % 3 == 0:
                    assert [token % 3 for token in completion.tokens] == [k % 3 for k in range(request.max_tokens)]
            if i % 3 and request.sampling.temperature == 0:
                assert samples[0].tokens == samples[1].tokens == alone(model, replace(request, samples=1)).tokens
    assert not limited[0].constraint.accepted  # the request's own is not used up


def test_a_constraint_on_a_host_that_is_a_step_behind(shape_of, build_random):
    """As on a GPU: the token before must be read first."""
    model = build_random(shape_of()).eval()
    generator = Generator(model, slots=4, max_length=128)
    generator.in_flight = 1
    work = [replace(request, constraint=CyclicRemainders()) for request in requests(6, seed=5)]
    for request, (completion,) in zip(work, generator.run(work), strict=True):
        assert [token % 3 for token in completion.tokens] == [k % 3 for k in range(request.max_tokens)]
