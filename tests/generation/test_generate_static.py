"""Fixed shapes: `cache_implementation="static"` gives the same tokens, and compiles once."""

import pytest
import torch
from test_generation import generate, prompts_of
from test_half_decoding import is_nearly_best, pair_of
from test_mask_trainer import stock_model
from tiny import tiny_model
from transformers import CompileConfig

from wedlm_hf.generation.versions import CACHE

STATIC = {"cache_implementation": "static"}
STRATEGIES = [{}, {"strategy": "block"}, {"verification": "exact"}]


def compiled(backend):
    config = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode="default")
    config._compile_all_devices = True
    return STATIC | {"compile_config": config}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [[6], [5, 1, 12, 7]])
def test_fixed_shapes_give_the_same_tokens_and_stay_the_same_whatever_the_limit(model, strategy, lengths):
    prompts, shapes = prompts_of(lengths), []
    options = strategy | {"window_size": 6} | ({} if "verification" in strategy else {"entropy_threshold": 2.0})

    def look(module, args, kwargs):
        seen.append((kwargs["input_ids"].shape, kwargs["attention_mask"].shape))

    for limit in (17, 3):
        dynamic, expected = generate(model, prompts, **options, max_new_tokens=limit)
        seen = []
        with model.register_forward_pre_hook(look, with_kwargs=True):
            output, rows = generate(model, prompts, **options, **STATIC, max_cache_len=64, max_new_tokens=limit)
        assert rows == expected
        assert output.stats.forwards.tolist() == dynamic.stats.forwards.tolist()
        shapes += seen[1:]  # the prompt's own forward is not compiled
    assert shapes[0][0] == (len(lengths), 12) and len(set(shapes)) == 1


@pytest.fixture
def graphs():
    """What torch.compile counts, from now on."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


EXACT = {"verification": "exact", "window_size": 4}
COMPILED = {
    "verified": (tiny_model, EXACT),
    "filled": (tiny_model, {"window_size": 4, "entropy_threshold": 2.0}),
    "sampled": (tiny_model, {"window_size": 4, "entropy_threshold": 2.0, "do_sample": True}),
    "Cohere2, adapter": (lambda: stock_model("Cohere2"), EXACT),  # all its layers slide
    "GptOss, adapter": (lambda: stock_model("GptOss"), EXACT),
}
FEW = ("verified", "Cohere2, adapter")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in COMPILED]
)
def test_steps_compile_once_and_not_again(name, graphs):
    chosen, options = COMPILED[name][0](), COMPILED[name][1]
    for count, lengths in ((1, [5, 2]), (1, [3, 8]), (2, [9]), (2, [4])):  # a graph for each size of a batch
        _, expected = generate(chosen, prompts_of(lengths), seed=3, **options)
        output, rows = generate(chosen, prompts_of(lengths), seed=3, **options, **compiled("eager"), max_cache_len=64)
        assert rows == expected and output.stats.forwards.max() > 3
        assert graphs["stats"]["unique_graphs"] == count and not graphs["graph_break"]


def test_what_a_graph_reads_and_writes_stays_where_it_is(model):
    """CUDA graphs replay on addresses: the cache's are marked, and the same from the first compiled step on."""
    places = []

    def note(module, args, kwargs, output):
        buffers = [buffer for layer in kwargs[CACHE].layers for buffer in (layer._keys, layer._values)]
        places.append([(buffer.data_ptr(), buffer.shape) for buffer in buffers])
        assert all(hasattr(buffer, "_dynamo_static_input_type") for buffer in buffers)

    with model.register_forward_hook(note, with_kwargs=True):
        generate(model, prompts_of([5, 9]), verification="exact", **STATIC)
    assert len(places) > 3 and all(each == places[0] for each in places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "batches"),
    [
        ("filled", torch.bfloat16, ([5, 2], [3, 8])),
        ("verified", torch.float32, ([9], [4])),
        ("adapter", torch.float32, ([9], [4])),
        ("adapter", torch.bfloat16, ([5, 2], [3, 8])),
    ],
)
def test_inductor_compiles_whole_steps_once(kind, dtype, batches, graphs):
    chosen, exact = pair_of(dtype, has_adapter=kind == "adapter")
    options = EXACT if kind == "adapter" else COMPILED[kind][1]
    for lengths in batches:
        prompts = prompts_of(lengths)
        _, expected = generate(chosen, prompts, **options)
        _, rows = generate(chosen, prompts, **options, max_cache_len=64, **compiled("inductor"))
        if dtype == torch.float32:
            assert rows == expected
        elif kind != "filled":  # inductor rounds less often
            assert all(is_nearly_best(exact, *pair, dtype) for pair in zip(prompts, rows, strict=True))
        assert graphs["stats"]["unique_graphs"] == 1 and not graphs["graph_break"]


@pytest.mark.slow
def test_a_compiled_forward_without_fixed_shapes_is_followed_as_a_whole_and_warned_of(caplog, graphs):
    model, options = tiny_model(), {"verification": "exact", "slot_cost": 0.5, "max_new_tokens": 12}
    _, expected = generate(model, prompts_of([6]), **options)
    assert not caplog.text
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert generate(model, prompts_of([6]), **options)[1] == expected
    assert 1 < graphs["stats"]["unique_graphs"] < 6  # lengths are symbols from their second value on
    assert "Pass `cache_implementation='static'`" in caplog.text


@pytest.mark.slow
def test_behind_a_compiled_model_sequences_may_end_at_different_times():
    model, ids, greedy = tiny_model(), torch.tensor(prompts_of([9, 9, 9])), {"do_sample": False, "max_new_tokens": 32}
    greedy["eos_token_id"] = int(model.generate(ids, **greedy)[1, 21])
    greedy |= {"pad_token_id": 0, "strategy": "wedlm", "verification": "exact"}
    expected = model.generate(ids, **greedy)
    assert len(set((expected == 0).sum(1).tolist())) > 1
    model.compile(backend="aot_eager")
    assert model.generate(ids, **greedy).equal(expected)
