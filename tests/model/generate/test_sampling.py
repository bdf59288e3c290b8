"""Generation: the cache changes nothing, filters are their definitions, seeds reproduce, the end token ends."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.attention import LayerCache
from bessemer.model.generate import Sampling, filter_logits, generate
from bessemer.model.generate.sampling import SamplingBatch
from bessemer.model.transformer import build_model
from bessemer.spec.shape import ModelShape, Rope

GREEDY = Sampling(temperature=0)


def ids(seed, *size, vocab=37):
    return torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[{}, {"kv_heads": 4, "tied": False}, {"kv_heads": 1, "qk_norm": "head"}], ids=str)
def model(request, shape_of, build_random):
    return build_random(shape_of(**request.param)).eval()


def states_by_chunks(model, tokens_BT, lengths):
    caches = [LayerCache() for _ in model.blocks]
    with torch.no_grad():
        return torch.cat([model(part, caches=caches) for part in tokens_BT.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("lengths", [[40], [1] * 40, [7, 1, 1, 12, 19], [16, 16, 8], [17, 1, 22], [1, 39]], ids=str)
def test_states_with_a_cache_equal_the_whole_at_once(model, lengths):
    """One by one, in chunks, and across the sizes (16, 32, 64) at which the buffers grow."""
    tokens = ids(1, 3, 40)
    with torch.no_grad():
        whole = model(tokens)
    torch.testing.assert_close(states_by_chunks(model, tokens, lengths), whole, rtol=1e-9, atol=1e-10)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 50))
@settings(max_examples=20)
def test_any_chunks_give_the_same_states(lengths, seed):
    model = build_model(ModelShape(37, 24, 2, 4, 2, 6, 40, rope=Rope(theta=100.0)), "cpu", seed).double()
    tokens = ids(seed, 1, sum(lengths))
    with torch.no_grad():
        whole = model(tokens)
    torch.testing.assert_close(states_by_chunks(model, tokens, lengths), whole, rtol=1e-9, atol=1e-11)


def test_greedy_tokens_equal_those_of_running_everything_again(model):
    prompt = ids(2, 5).tolist()
    tokens = list(prompt)
    for _ in range(40):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([tokens])))[0, -1]
        top = logits.topk(2).values
        assert top[0] - top[1] > 1e-6, "a tie would prove nothing"
        tokens.append(int(logits.argmax()))
    assert list(generate(model, prompt, 40, (), GREEDY)) == tokens[5:]


def test_sampled_tokens_are_the_draws_of_running_everything_again(model):
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, seed=5)
    prompt = ids(3, 4).tolist()
    settings, tokens = SamplingBatch.of([sampling], torch.device("cpu")), list(prompt)
    for _ in range(25):
        with torch.no_grad():
            logits_1V = model.logits(model(torch.tensor([tokens])))[:, -1]
        tokens.append(int(settings.draw(logits_1V, torch.tensor([len(tokens)]))))
    assert list(generate(model, prompt, 25, (), sampling)) == tokens[4:]


def chi_square_p(counts, shares):
    """How likely counts this far from their shares are."""
    expected = shares * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(shares) - 1) / 2.0), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.15}], ids=str)
def test_draws_follow_the_distribution(fields):
    """20,000 draws by seeds at one position, and by positions of one seed."""
    logits_V = torch.randn(9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sampling = Sampling(**({"temperature": 1.0} | fields))
    shares = filter_logits(logits_V, sampling).double().softmax(-1)
    number = torch.arange(20_000)
    settings = SamplingBatch.of([sampling] * len(number), torch.device("cpu"))
    for seeds, positions in ((number, torch.zeros_like(number)), (torch.full_like(number, 7), number)):
        drawn = replace(settings, seed_B=seeds).draw(logits_V.expand(len(number), -1), positions)
        counts = torch.bincount(drawn, minlength=9).double()
        assert counts[shares == 0].sum() == 0
        assert chi_square_p(counts[shares > 0], shares[shares > 0]) > 1e-3


def test_penalties_are_those_of_transformers_and_openai():
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(2, 11, generator=torch.Generator().manual_seed(1))
    prompt, answer = [[1, 2, 2], [3, 3, 3]], [[4, 4, 2], [5, 6, 5]]
    counts = [
        torch.stack([torch.bincount(torch.tensor(row), minlength=11).float() for row in x]) for x in (prompt, answer)
    ]
    settings = SamplingBatch.of([Sampling(repetition_penalty=1.7), Sampling()], torch.device("cpu"))
    theirs = processors.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt[0] + answer[0]]), logits[:1].clone())
    found = settings.penalize(logits, *counts)
    torch.testing.assert_close(found[:1], theirs)
    torch.testing.assert_close(found[1], logits[1])
    settings = SamplingBatch.of([Sampling(presence_penalty=0.5, frequency_penalty=0.25)] * 2, torch.device("cpu"))
    expected = logits - 0.5 * (counts[1] > 0) - 0.25 * counts[1]
    torch.testing.assert_close(settings.penalize(logits, *counts), expected)


def test_a_seed_reproduces_and_another_differs(model):
    prompt = [1, 2, 3]
    one, again, other = (list(generate(model, prompt, 30, (), Sampling(1.0, seed=seed))) for seed in (1, 1, 2))
    assert one == again != other


def test_the_global_generator_plays_no_part(model):
    torch.manual_seed(1)
    one = list(generate(model, [1], 10, (), Sampling(1.0)))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert list(generate(model, [1], 10, (), Sampling(1.0))) == one
    assert torch.equal(torch.get_rng_state(), state)


def test_the_end_token_ends_and_is_not_given_out(model):
    free = list(generate(model, [4, 5], 30, (), Sampling(1.0, seed=3)))
    eos = free[12]
    assert list(generate(model, [4, 5], 30, {eos}, Sampling(1.0, seed=3))) == free[: free.index(eos)]
    assert list(generate(model, [4, 5], 7, (), Sampling(1.0, seed=3))) == free[:7]
    assert list(generate(model, [4, 5], 0, (), GREEDY)) == []


def test_generation_is_lazy_and_leaves_no_gradients(model):
    tokens = generate(model, [1], 10**9, (), GREEDY)
    assert 0 <= next(tokens) < 37
    tokens.close()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def kept(logits, sampling):
    return {i for i, value in enumerate(filter_logits(torch.tensor(logits), sampling).tolist()) if value > -math.inf}


# Steps of 0.01 in the logits: ties are exact, and everything else is told apart in float32.
logit_lists = st.lists(st.integers(-300, 300).map(lambda k: k / 100), min_size=1, max_size=12)


@given(logits=logit_lists, k=st.integers(1, 15), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_top_k_keeps_the_k_largest_and_their_ties(logits, k, temperature):
    least = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    expected = {i for i, value in enumerate(logits) if value >= least}
    assert kept(logits, Sampling(temperature, top_k=k)) == expected


@given(logits=logit_lists, p=st.floats(0.01, 0.99), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p, temperature):
    weights = [math.exp(value / temperature) for value in logits]
    shares = sorted((weight / math.fsum(weights) for weight in weights), reverse=True)
    sums = [math.fsum(shares[:n]) for n in range(len(shares) + 1)]
    if min(abs(total - p) for total in sums) < 1e-5:
        return  # float32 may round to either side
    size = next(n for n, total in enumerate(sums) if total >= p)
    found = kept(logits, Sampling(temperature, top_p=p))
    assert len(found) == size
    assert sorted((logits[i] for i in found), reverse=True) == sorted(logits, reverse=True)[:size]


@given(logits=logit_lists, k=st.integers(1, 12), p=st.floats(0.05, 0.95))
def test_top_p_counts_within_top_k(logits, k, p):
    by_k = sorted(kept(logits, Sampling(1.0, top_k=k)))
    weights = {i: math.exp(logits[i]) for i in by_k}
    total, reached, expected = math.fsum(weights.values()), 0.0, []
    for i in sorted(by_k, key=lambda i: -logits[i]):
        if reached >= p:
            break
        expected.append(logits[i])
        reached += weights[i] / total
        if abs(reached - p) < 1e-5:
            return
    assert sorted((logits[i] for i in kept(logits, Sampling(1.0, top_k=k, top_p=p))), reverse=True) == expected


@given(logits=logit_lists, temperature=st.floats(0.1, 5))
def test_without_limits_only_the_temperature_acts(logits, temperature):
    found = filter_logits(torch.tensor(logits), Sampling(temperature))
    torch.testing.assert_close(found, torch.tensor([value / temperature for value in logits]), rtol=1e-5, atol=1e-6)


def test_filters_keep_the_odds_among_what_they_keep():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = filter_logits(logits, Sampling(1.0, top_k=20, top_p=0.8))
    inside = found > -math.inf
    assert 1 < int(inside.sum()) < 20
    assert torch.equal(found[inside], logits[inside])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"temperature": -0.1}, "temperature -0.1 is negative"),
        ({"top_p": 0.0}, "top-p 0.0"),
        ({"top_p": 1.5}, "top-p 1.5"),
        ({"top_k": -1}, "top-k -1"),
        ({"min_p": 1.0}, "min-p 1.0"),
        ({"repetition_penalty": 0.0}, "repetition penalty 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, word):
    with pytest.raises(UserError, match=word):
        Sampling(**fields)
