"""What is recorded is what was decoded, forward by forward."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf.adapters import add_mask_adapter
from wedlm_hf.eval.measure import ForwardCounter, decode_call
from wedlm_hf.eval.request import AnswerRequest
from wedlm_hf.eval.trace import record as recording_module
from wedlm_hf.eval.trace.page import COUNTS, FILLED, MASK, PENDING, PROMPT
from wedlm_hf.eval.trace.record import pieces_of, token_text

TEXT = "1, 2, 3"
SETTINGS = {
    "greedy": {"entropy_threshold": 1.5},
    "sampled": {"entropy_threshold": 1.5, "do_sample": True, "temperature": 1.3},
    "one at a time": {"entropy_threshold": 0.0, "distance_penalty": 0.3},
    "block": {"strategy": "block", "entropy_threshold": 1.5},
    "exact": {"verification": "exact", "draft_threshold": 3.0, "adaptive_window": False},
    "exact, adaptive": {"verification": "exact", "draft_threshold": 3.0, "slot_cost": 0.04},
    "exact, sampled": {"verification": "exact", "draft_threshold": 3.0, "do_sample": True, "slot_cost": 0.04},
}


def generated(model, name, tokens=24, seed=5):
    """The same by a direct call."""
    inputs = tiny_tokenizer()(TEXT, return_tensors="pt")
    torch.manual_seed(seed)
    settings = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": tokens, **SETTINGS[name]}
    with ForwardCounter(model) as counter:
        output = model.generate(**inputs, **settings, return_dict_in_generate=True)
    return output.sequences[0, inputs.input_ids.shape[1] :].tolist(), output.stats, counter


def replay(recording, run):
    """The new tokens and the counts, rebuilt from the rows of the steps and what they filled and committed.

    No step may contradict an earlier one, or the prompt.
    """
    settled, is_verified = dict(enumerate(recording.prompt_tokens)), run.settings.get("verification", "none") != "none"
    filled, rejected = {}, set()
    cached, start, counts = 0, len(settled), dict.fromkeys(COUNTS, 0)
    for number, step in enumerate(run.steps, 1):
        here = f"forward {number}:"
        widths = {len(step.positions), len(step.tokens), len(step.kinds)}
        assert len(widths) == 1 and step.committed <= max(widths), f"{here} rows of different lengths"
        assert set(step.kinds) <= {PROMPT, PENDING, FILLED, MASK}, f"{here} rows of kinds {step.kinds!r}"
        rows = list(zip(step.positions, step.tokens, step.kinds, strict=True))
        read = {position: token for position, token, kind in rows if kind == FILLED}
        for position, token in read.items():
            assert filled.get(position) == token, f"{here} nothing filled position {position} so"
        assert {step.kinds[row] for row in step.rejected} <= {FILLED}, f"{here} what was no draft is rejected"
        rejected |= {(number, step.positions[row], step.tokens[row], step.final) for row in step.rejected}
        for prediction in step.predictions:
            if prediction.token is not None:
                filled[prediction.position] = prediction.token
                if prediction.by == "ar" or not is_verified:
                    settled[prediction.position] = prediction.token
        for position, token, _ in rows[: step.committed]:
            in_turn = position == cached and settled.get(position) == token
            assert in_turn, f"{here} position {position} is cached out of turn"
            cached += 1
        while (end := start + counts["new_tokens"]) in settled and end < start + step.final:
            counts["new_tokens"] += 1
        assert end == start + step.final, f"{here} position {end} is final, and nothing filled it"
        counts["forwards"] += 1
        counts["token_instances"] += len(rows) - step.kinds.count(PROMPT)
        if is_verified:
            counts["drafted"] += len(read)
            counts["accepted"] += len(read) - len(step.rejected)
    for number, position, token, final in rejected:
        assert position >= start + final or settled[position] != token, f"forward {number}: what is rejected is final"
    return [settled[start + offset] for offset in range(counts["new_tokens"])], counts


@pytest.mark.parametrize("name", SETTINGS)
def test_fills_and_commits_rebuild_exactly_what_generate_answers(model, recorded, name):
    trace = recorded(SETTINGS[name])
    (recording,) = trace.recordings
    run, ar = recording.runs
    tokens, stats, counter = generated(model, name)
    assert run.tokens == tokens
    assert replay(recording, ar) == (ar.tokens, ar.stats)
    assert run.text == "".join(run.pieces) == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    expected = {name: getattr(stats, name).item() for name in COUNTS}
    assert run.stats == expected
    assert replay(recording, run) == (tokens, expected)
    assert len(run.steps) == counter.forwards
    assert name not in ("exact", "exact, sampled") or run.stats["drafted"] > run.stats["accepted"]
    assert [len(step.tokens) for step in run.steps] == [width for _, width in counter.shapes]
    assert ar.stats["forwards"] == len(ar.steps) == len(ar.tokens)


def test_a_trace_shows_slots_that_are_filled_before_their_left_neighbours(recorded):
    run = recorded(SETTINGS["one at a time"]).recordings[0].runs[0]
    reordered = [step for step in run.steps if step.positions != sorted(step.positions)]
    assert reordered
    for step in run.steps:
        kinds = step.kinds.lstrip("c").lstrip("p").lstrip("f")
        assert set(kinds) <= {"m"}  # pending, filled, masks: the physical order
        for kind in "cpfm":
            positions = [
                position for position, letter in zip(step.positions, step.kinds, strict=True) if letter == kind
            ]
            assert positions == sorted(positions)


def test_of_drafts_that_branch_those_passed_that_generate_counted():
    model = tiny_model()
    add_mask_adapter(model)
    options = {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.0, "max_new_tokens": 64}
    request = AnswerRequest([TEXT], options, with_ar=False, raw=True, seed=5)
    (recording,) = recording_module.record(model, tiny_tokenizer(), request, model_name="tiny", repeats=0).recordings
    (run,) = recording.runs
    sequence, drafted, accepted, branching = recording.prompt_tokens + run.tokens, 0, 0, 0
    for step in run.steps:
        drafts = [row for row, kind in enumerate(step.kinds) if kind == FILLED]
        passed = [row for row in drafts if row not in step.rejected]
        assert [step.tokens[row] for row in passed] == [sequence[step.positions[row]] for row in passed]
        assert len({step.positions[row] for row in passed}) == len(passed)
        branching += len({step.positions[row] for row in drafts}) < len(drafts)
        drafted, accepted = drafted + len(drafts), accepted + len(passed)
    assert branching and accepted and (drafted, accepted) == (run.stats["drafted"], run.stats["accepted"])


def test_entropies_are_those_of_the_model(model, recorded):
    (recording,) = recorded(SETTINGS["greedy"], tokens=6).recordings
    run, ar = recording.runs
    for step in (run.steps[0], ar.steps[0]):
        ids, positions = torch.tensor([step.tokens]), torch.tensor([step.positions])
        with torch.no_grad():
            logits = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0].double()
        log_probs = logits.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        for guess in step.predictions:
            row = step.positions.index(guess.position if guess.by == "mask" else guess.position - 1)
            assert guess.entropy == pytest.approx(entropies[row].item(), abs=2e-4)
            shares, tokens = log_probs[row].exp().topk(5)
            assert [token for token, _ in guess.likeliest] == tokens.tolist()[: len(guess.likeliest)]
            kept = [share for share in shares.tolist() if share >= 0.001]
            assert [share for _, share in guess.likeliest] == pytest.approx(kept, abs=1e-4)


def test_the_settings_of_a_run_are_those_that_generate_used(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "window_size", 4, raising=False)
    monkeypatch.setattr(model.generation_config, "entropy_threshold", 1.5, raising=False)
    for options, window, name, threshold in (
        ({}, 4, "entropy_threshold", 1.5),
        ({"verification": "exact"}, 32, "draft_threshold", 2.0),  # what is stored was chosen for another decoder
        ({"window_size": 3, "verification": "exact"}, 3, "draft_threshold", 2.0),
    ):
        request = AnswerRequest([TEXT], {"strategy": "wedlm", "max_new_tokens": 5, **options}, with_ar=False, raw=True)
        trace = recording_module.record(model, tiny_tokenizer(), request, model_name="tiny", repeats=0)
        settings = trace.recordings[0].runs[0].settings
        assert (settings["window_size"], settings[name]) == (window, threshold)


def test_the_clock_starts_with_the_call_and_holds_medians_of_runs_that_record_nothing(recorded, monkeypatch):
    clocks = iter([[9.0] * 2, [0.0, 0.1], [0.0, 0.3], [0.0, 0.2]])  # the recording call, then the timed ones
    calls: list = []

    def call(*arguments, **options):
        decodings, output, _ = decode_call(*arguments, **options)
        assert output.get("trace") is None or not calls
        calls.append(output)
        return decodings, output, SimpleNamespace(moments=next(clocks))

    monkeypatch.setattr(recording_module, "decode_call", call)
    run = recorded(SETTINGS["greedy"], tokens=1, repeats=3, with_ar=False).recordings[0].runs[0]
    assert len(calls) == 4
    assert ([step.start for step in run.steps], run.seconds, len(run.turns)) == ([0.0], 0.2, 3)


def test_more_turns_are_taken_while_the_speed_is_impossible(recorded, monkeypatch):
    def times(ar):
        def call(model, tokenizer, prompts, options, *rest, **keywords):
            (decoding,), *others = decode_call(model, tokenizer, prompts, options, *rest, **keywords)
            seconds = next(ar) if options["strategy"] == "ar" else 1.0
            return [replace(decoding, seconds=seconds)], *others

        return call

    for ar, turns in (([1.0] * 9, 2), ([99.0] * 9, 5), ([99.0, 99.0, 99.0, 1.0, 1.0, 1.0], 5)):
        monkeypatch.setattr(recording_module, "decode_call", times(iter(ar)))
        runs = recorded(SETTINGS["greedy"], tokens=8, repeats=2).recordings[0].runs
        assert [len(run.turns) for run in runs] == [turns, turns], ar


def test_characters_of_several_tokens_come_with_their_last_one():
    tokenizer = tiny_tokenizer()
    euro = tokenizer("€").input_ids
    assert pieces_of(tokenizer, [*tokenizer("a").input_ids, *euro, *euro[:1]]) == ["a", "", "", "€", "\ufffd"]
    assert [token_text(tokenizer, token) for token in euro] == ["⟨E2⟩", "⟨82⟩", "⟨AC⟩"]
