"""Mask adapters on models that keep a state: verified decoding is plain `generate`, and training a plain forward.

STATE_TEXTS=200 pytest tests/adapters/test_states.py -k plain_generate      200 texts of each type
"""

import os
import random
import sys
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_families import EXPERTS, PAGE, PROCESSORS, build, prompt
from test_mask_adapter import with_adapter
from test_mask_trainer import K, answers, check_loss_and_gradient
from tiny import VOCAB_SIZE, tiny_tokenizer

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.evaluation import accepted_runs
from wedlm_hf.eval.report.request import ReportRequest
from wedlm_hf.eval.report.run import _decoders, run
from wedlm_hf.eval.table import speed_table
from wedlm_hf.generation import mixin
from wedlm_hf.generation.drafter import Drafter
from wedlm_hf.generation.forward import CHUNKED
from wedlm_hf.generation.rows import Row, Tree
from wedlm_hf.generation.versions import CACHE, cache_of

TEXTS = int(os.environ.get("STATE_TEXTS", "2"))  # of each type
HEADS = {"head_dim": 8}
DELTA = HEADS | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MAMBA |= {"mamba_expand": 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
NEMOTRON = HEADS | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
NEMOTRON |= {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}
MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 24, "num_dense_layers": 1}
GRANITE = {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 24}

# The name in transformers, and what its config has beside the sizes.
STATEFUL: dict[str, dict[str, Any]] = {
    "Bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": MAMBA | SHARED | GRANITE,
    "Lfm2": CONV,
    "Lfm2Moe": CONV | SHARED,
    "Mamba2": MAMBA2,
    "NemotronH": NEMOTRON | {"time_step_min": 1e-9},  # no time step is shorter
    "OlmoHybrid": DELTA,
    "Qwen3Next": DELTA | SHARED,
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": DELTA | SHARED,
}
SEVERAL = "it keeps a state, and several tokens behind others in one forward give other logits than the same text"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "FalconMamba": ({"state_size": 8, "time_step_rank": 4}, SEVERAL),
    "Jamba": ({"num_experts": 4, "mamba_dt_rank": 4, "mamba_d_state": 8, "attn_layer_offset": 1}, SEVERAL),
    "Mamba": ({"state_size": 8, "time_step_rank": 4}, SEVERAL),
    "MiniMax": ({}, "it keeps a state, and a forward on that fails"),
    "NemotronH": (NEMOTRON, "it keeps a state, and single tokens, one by one, give other logits than the same text"),
    "RecurrentGemma": ({}, SEVERAL),
}
EXACT: dict[str, Any] = {"strategy": "wedlm", "verification": "exact"}
LENGTH: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": 96}
GREEDY = LENGTH | {"do_sample": False}
FIXED: dict[str, Any] = {"window_size": 3}


def adapted(name: str) -> Any:
    return with_adapter(build(name, STATEFUL[name]))


def know(monkeypatch: pytest.MonkeyPatch, text: list[int], chance: float, seed: int) -> None:
    """Lets masks draft what follows in `text`, each with this chance, or else anything."""
    rng = random.Random(seed)

    def draft(at: int) -> int:
        return text[at] if at < len(text) and rng.random() < chance else rng.randrange(97)

    def drafts(self: Any, sequence: Any, masks: int, guesses: list[Any]) -> Tree:
        return Tree(Row(draft(len(sequence.tokens) + depth), depth + 1, depth - 1, chance) for depth in range(masks))

    monkeypatch.setattr(Drafter, "drafts", drafts)


def check_text(model: Any, number: int, monkeypatch: pytest.MonkeyPatch, longest: int, new_tokens: int) -> list[int]:
    """Tokens of a text, and forwards where most drafts are right, and where few are."""
    rng = random.Random(number)
    ids, is_sampled = prompt(rng.randint(1, longest)), number % 2 == 1
    options: dict[str, Any] = LENGTH | {"max_new_tokens": new_tokens, "do_sample": is_sampled, "top_k": 0}

    def generated(**how: Any) -> Any:
        torch.manual_seed(number)
        return model.generate(ids, **options, **how, return_dict_in_generate=True)

    # A seed gives the same sample, whatever is drafted.
    whole = generated(**(EXACT | {"slot_cost": 1e9} if is_sampled else {})).sequences
    assert torch.equal(generated(**EXACT).sequences, whole)  # its own drafts, nearly all wrong; by measured times
    found = [whole.shape[1] - ids.shape[1]]
    for chance in (0.9, 0.3):
        know(monkeypatch, whole[0].tolist(), chance, number)
        output = generated(**EXACT, **rng.choice([FIXED, {"slot_cost": 0.01}]))
        monkeypatch.undo()
        assert torch.equal(output.sequences, whole)
        found.append(int(output.stats.forwards))
    return found


def lines_of(name: str) -> list[str]:
    """Of the tables of models that keep a state, those that name a family."""
    _, _, page = PAGE.read_text(encoding="utf-8").partition("## Models that keep a state")
    return [line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line]


@pytest.mark.parametrize("name", STATEFUL)
def test_verified_decoding_is_plain_generate(name, monkeypatch):
    model = adapted(name)
    targets = ", ".join(f"`{target}`" for target in model.mask_adapter.settings.target_modules)
    assert any(line.endswith(f" | {targets} |") for line in lines_of(name))
    size = (200, 64) if TEXTS > 2 else (40, 12)
    found = [check_text(model, number, monkeypatch, *size) for number in range(TEXTS)]
    tokens, often, seldom = map(sum, zip(*found, strict=True))
    print(f"{name}: {TEXTS} texts of {tokens} tokens; {often} forwards with drafts right by 90 %, {seldom} by 30 %")
    assert often < 0.7 * tokens and often < seldom


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.3, 0.9])
def test_where_rows_are_free_forwards_are_about_as_few_as_of_a_chain_on_attention(chance, monkeypatch):
    rates = []
    for model in (with_adapter(build("Qwen3", HEADS)), adapted("Qwen3_5")):
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        tokens = forwards = 0
        for number in range(3):
            ids = prompt(10 + number)
            options: dict[str, Any] = {"max_new_tokens": 120, "do_sample": False, "return_dict_in_generate": True}
            text = model.generate(ids, **options).sequences
            monkeypatch.setattr(mixin, "DENSE_MASK_ATTENTION", ())  # no branches
            know(monkeypatch, text[0].tolist(), chance, number)
            output = model.generate(ids, **options, **EXACT, slot_cost=0.0)
            monkeypatch.undo()
            assert torch.equal(output.sequences, text)
            tokens, forwards = tokens + output.stats.new_tokens.item(), forwards + output.stats.forwards.item()
        rates.append(tokens / forwards)
    assert rates[1] > rates[0] / 1.15


@pytest.mark.parametrize(("name", "usual"), [("FalconH1", 8), ("Mamba2", 8), ("Qwen3_5", 64)])
def test_steps_read_chunks_no_longer_than_their_rows_and_prompts_those_of_plain_generate(name, usual, monkeypatch):
    model = build(name, STATEFUL[name])
    home = sys.modules[type(model).__module__]
    (function,) = (each for each in CHUNKED if hasattr(home, each))
    read, found = getattr(home, function), []

    def noting(rows: torch.Tensor, *args: Any, chunk_size: int = 64, **kwargs: Any) -> Any:
        found.append((rows.shape[1], chunk_size))
        return read(rows, *args, chunk_size=chunk_size, **kwargs)

    monkeypatch.setattr(home, function, noting)
    plain = model.generate(prompt(5), **GREEDY)
    assert set(found) == {(5, usual)}
    with_adapter(model)
    found.clear()
    assert torch.equal(model.generate(prompt(5), **GREEDY, **EXACT, **FIXED), plain)
    prompts, steps = ([each for each in found if (each[0] == 5) == is_prompt] for is_prompt in (True, False))
    assert (5, usual) in prompts and all(chunk == min(rows, usual) for rows, chunk in steps) and steps


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_be_read_as_decoding_reads_it_is_refused(name):
    own, reason = REFUSED[name]
    model = build(name, own)
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot carry a mask adapter: {reason}"):
        add_mask_adapter(model, MaskAdapterSettings(rank=4))
    reason = reason.rpartition(", and ")[2].partition(" than ")[0].removesuffix(", one by one, give other logits")
    assert any(reason in line for line in lines_of(name))


def test_of_some_layers_those_linear_layers_are_updated_that_they_have():
    def added(**how: Any) -> Any:  # layers keep a state and attend in turn
        return add_mask_adapter(build("Qwen3_5", STATEFUL["Qwen3_5"]), MaskAdapterSettings(rank=4, **how))

    found = added(layers_to_transform=(1, 3)).down
    assert {key: len(weight) for key, weight in found.items()} == {"down_proj": 2, "o_proj": 2}
    with pytest.raises(ValueError, match=r"None of the layers \[0, 2\] of Qwen3_5\w+ has the linear layer 'o_proj'"):
        added(target_modules=("o_proj",), layers_to_transform=(0, 2))


def test_a_state_that_no_cache_holds_is_seen():
    model = build("Lfm2", CONV)
    # The whole text, its first part, the forward that is forgotten, and what goes on as if it were.
    calls, numbers = count(1), torch.arange(32)
    model.model.layers[0].register_forward_hook(lambda _, args, output: output + (next(calls) > 3) * numbers)
    with pytest.raises(ValueError, match="tokens behind a forward that was forgotten give other logits"):
        add_mask_adapter(model)


@pytest.mark.parametrize("name", ["Lfm2", "Qwen3_5", "FalconH1"])
def test_turns_go_on_from_a_returned_cache(name):
    model = adapted(name)
    first = model.generate(prompt(7), **GREEDY, **EXACT, **FIXED, return_dict_in_generate=True)
    cache, read = cache_of(first), []
    known = cache.lengths[0]
    assert 7 <= known < first.sequences.shape[1]

    def checked(ids: torch.Tensor) -> torch.Tensor:
        """What is generated behind the cache, as plain `generate` does without one."""
        whole = {"attention_mask": torch.ones_like(ids)} | GREEDY
        note = model.get_input_embeddings().register_forward_hook(lambda _, args, __: read.append(args[0].shape[1]))
        with note:
            found = model.generate(ids, **whole, **EXACT, **FIXED, **{CACHE: cache})
        assert torch.equal(found, model.generate(ids, **whole))
        return found

    longer = torch.cat([first.sequences, prompt(4)], dim=1)
    second = checked(longer)
    assert read[0] == longer.shape[1] - known
    # A state cannot go back by a token, whose row is needed: all is read from the start.
    again = checked(second[:, : cache.lengths[0]])
    with pytest.raises(ValueError, match="its layers keep a state"):
        cache.crop(-1)
    # An exception, here in a forward that is to be forgotten, leaves an empty cache.
    last, ends = torch.cat([again, prompt(4)], dim=1), Mock(side_effect=[None, None, KeyboardInterrupt])
    with model.model.layers[1].register_forward_pre_hook(ends), pytest.raises(KeyboardInterrupt):
        checked(last)
    assert cache.lengths == []
    checked(last)


@pytest.mark.parametrize("name", ["FalconH1", "Lfm2", "Qwen3_5"])
def test_processors_stop_strings_and_streamers_are_those_of_plain_generate(name, monkeypatch):
    model, tokenizer = with_adapter(build(name, STATEFUL[name] | {"vocab_size": VOCAB_SIZE})), tiny_tokenizer()
    whole = model.generate(prompt(9), **GREEDY)[0].tolist()
    words = [word for token in whole[20:] if (word := tokenizer.decode([token])).isascii() and word.strip()]
    stop = {"stop_strings": words[0], "tokenizer": tokenizer}

    def streamed(**how: Any) -> tuple[list[int], list[int], Any]:
        torch.manual_seed(5)
        streamer = Mock()
        output = model.generate(prompt(9), **GREEDY | how, return_dict_in_generate=True, streamer=streamer)
        streamer.end.assert_called_once()
        told = [int(token) for call in streamer.put.call_args_list for token in call.args[0].flatten()]
        return output.sequences[0].tolist(), told, output

    processors = PROCESSORS | {"bad_words_ids": [[9], [11]]}
    for options in (processors, processors | {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}, stop):
        # A seed gives the same sample, whatever is drafted.
        expected = streamed(**options, **(EXACT | {"slot_cost": 1e9} if "temperature" in options else {}))
        know(monkeypatch, expected[0], 0.8, 0)
        found = streamed(**options, **EXACT, **FIXED)
        monkeypatch.undo()
        assert found[:2] == expected[:2] and found[0] == found[1]
        assert options is stop or found[2].stats.forwards < 0.8 * (len(found[0]) - 9)
    assert len(found[0]) < len(whole)


def test_what_a_state_forbids_is_refused_with_the_reason_and_no_report_or_table_asks_for_it(tmp_path):
    model = with_adapter(build("Lfm2", CONV | {"vocab_size": VOCAB_SIZE}))
    model.config.mask_token_id = 95
    for how, got in (
        ({"num_return_sequences": 2, "do_sample": True, **EXACT}, "a batch of 2 sequences"),
        ({"strategy": "wedlm"}, "`strategy='wedlm'` without verification"),
        ({"cache_implementation": "static", **EXACT}, "`cache_implementation='static'`"),
    ):
        with pytest.raises(ValueError, match=f"keeps a recurrent state.*one sequence at a time.*got {got}"):
            model.generate(prompt(5), max_new_tokens=8, **how)
    request = ReportRequest(model="any", output=tmp_path)
    assert _decoders(request, model) == ["wedlm+exact"]
    assert _decoders(request, build("Qwen3", HEADS)) == ["block", "wedlm", "wedlm+exact"]
    request = ReportRequest(model="any", batch_size=4, output=tmp_path)
    with pytest.raises(ValueError, match="keeps a state and decodes one prompt at a time: leave `--batch-size` out"):
        run(request, model, tiny_tokenizer(), [], "")
    table = speed_table(model, tiny_tokenizer(), [prompt(5)[0].tolist(), prompt(7)[0].tolist()], 8)
    assert [row[0] for row in table["rows"]] == ["ar", "wedlm+exact"]  # prompt lookup takes no states


@pytest.mark.parametrize("name", STATEFUL)
def test_loss_and_gradient_are_those_of_prefix_and_masks_one_by_one(name):
    check_loss_and_gradient(adapted(name), answers(2, vocabulary=97))


@pytest.mark.parametrize("name", ["Qwen3_5", "FalconH1"])
def test_replayed_acceptance_is_that_of_decoding(name):
    model = adapted(name)
    tokens = model.generate(prompt(6), max_new_tokens=40, min_new_tokens=40, do_sample=False)[0].tolist()
    distillation = MaskDistillation(model, num_masks=K)
    found = accepted_runs(distillation, {"prompt_ids": tokens[:6], "response_ids": tokens[6:]}).tolist()
    for place in range(0, 34, 3):  # 32 cuts are a portion
        cut, right = torch.tensor([[5 + place]]), 0
        _, memory = distillation.memory(torch.tensor([tokens]), cut)
        hidden = distillation.masks(memory, cut)[0, 0]
        for depth, token in enumerate(tokens[7 + place : 7 + place + K]):
            before = torch.tensor([tokens[5 + place + depth : 7 + place + depth]])
            if int(distillation.drafts(hidden[[depth]], before)) != token:
                break
            right += 1
        assert found[place] == right


def test_rows_without_masks_are_read_where_many_tokens_are_pending(monkeypatch):
    model, ids = adapted("Lfm2"), prompt(12)
    whole = model.generate(ids, **GREEDY)
    know(monkeypatch, whole[0].tolist(), 0.5, 3)
    assert torch.equal(model.generate(ids, **GREEDY, **EXACT, slot_cost=0.01), whole)
