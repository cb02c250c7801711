"""Fixed shapes: `cache_implementation="static"` gives the same tokens, and compiles once."""

import pytest
import torch
from test_generation import generate, prompts_of
from tiny import tiny_model
from transformers import CompileConfig

from wedlm_hf.generation import WindowCache

STATIC = {"cache_implementation": "static"}
STRATEGIES = [
    {},
    {"strategy": "block"},
    {"verification": "exact"},
    {"verification": "typical", "adaptive_window": False},
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def compiled(backend):
    config = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode="default")
    config._compile_all_devices = True
    return STATIC | {"compile_config": config}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [[6], [5, 1, 12, 7]])
def test_fixed_shapes_give_the_same_tokens(model, strategy, lengths):
    options = strategy | {"entropy_threshold": 2.0, "window_size": 6, "adaptive_window": False}
    dynamic, expected = generate(model, prompts_of(lengths), **options)
    shapes = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    output, rows = generate(model, prompts_of(lengths), **options, **STATIC)
    handle.remove()
    assert rows == expected
    assert output.stats.forwards.tolist() == dynamic.stats.forwards.tolist()
    assert set(shapes[1:]) == {(len(lengths), 12)}
    if len(lengths) > 1:
        assert len(set(map(len, rows))) > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cache_of_fixed_shape_goes_on_with_fixed_shapes(model, strategy):
    options = strategy | {"entropy_threshold": 2.0, "window_size": 6}
    first, rows = generate(model, prompts_of([5, 9]), **options, **STATIC)
    turns = [a + b + c for a, b, c in zip(prompts_of([5, 9]), rows, prompts_of([4, 3], seed=7), strict=True)]
    _, cold = generate(model, turns, **options)
    warm, warm_rows = generate(model, turns, **options, past_key_values=first.past_key_values)
    assert warm_rows == cold
    assert warm.past_key_values.capacity is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_compile_once_and_not_again(model, strategy):
    torch._dynamo.reset()
    options = strategy | {"entropy_threshold": 2.0, "window_size": 4}
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    for lengths in ([5, 2], [3, 8]):  # a shorter and a longer prompt in the same shape
        _, expected = generate(model, prompts_of(lengths), **options)
        with torch._dynamo.config.patch(error_on_recompile=len(compiles) > 0):
            output, rows = generate(model, prompts_of(lengths), **options, **compiled(backend), max_cache_len=64)
        assert rows == expected
        assert output.stats.forwards.max() > 3
    assert len(compiles) == 1


@pytest.mark.slow
def test_aot_eager_compiles_too(model):
    torch._dynamo.reset()
    _, expected = generate(model, prompts_of([5, 2]), verification="exact")
    assert generate(model, prompts_of([5, 2]), verification="exact", **compiled("aot_eager"))[1] == expected


def test_a_cache_that_is_made_with_a_capacity_says_at_once_that_it_compiles():
    assert WindowCache(capacity=64).is_compileable
    assert not WindowCache().is_compileable
