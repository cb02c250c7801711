"""Decoders side by side on prompts with known answers, and what is said of those that are wrong or slow."""

import pandas as pd
import pytest
from tiny import MASK, tiny_model, tiny_tokenizer

from wedlm_hf.eval import compare as comparing
from wedlm_hf.eval.compare import advice, compare
from wedlm_hf.eval.measure import decode
from wedlm_hf.eval.prompts import Prompt, encode_prompt

LIMIT = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [MASK]}
DECODERS = {
    "plain": {"strategy": "ar", **LIMIT},
    "exact": {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.04, **LIMIT},
    "hasty": {"strategy": "wedlm", "verification": "none", "entropy_threshold": 9.0, **LIMIT},
}


@pytest.fixture(scope="module")
def asked():
    """A model, its tokenizer, and prompts of which its own AR answers are the right ones, but for the last."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = [encode_prompt(model, tokenizer, Prompt.of(f"Sort {index}, {9 - index}")) for index in range(7)]
    texts = [decode(model, tokenizer, [list(each.tokens)], DECODERS["plain"])[0].text for each in prompts]
    answers = [*((text,) for text in texts[:-1]), ("something else",)]
    return model, tokenizer, [Prompt(p.messages, answers=a) for p, a in zip(prompts, answers, strict=True)]


def test_a_row_for_each_decoder_with_what_is_right_tokens_per_forward_and_a_second_and_their_errors(asked):
    rows = {row["decoder"]: row for row in compare(*asked, DECODERS)}
    assert list(rows) == list(DECODERS)
    for name in ("plain", "exact"):
        assert rows[name]["right"] == pytest.approx(6 / 7) and rows[name]["advice"] == ""
        assert 0 < rows[name]["right_error"] < 0.3
    assert rows["plain"]["tokens_per_forward"] == 1 and rows["exact"]["tokens_per_forward"] >= 1
    assert rows["hasty"]["right"] < 0.5 and rows["hasty"]["tokens_per_forward"] > 2
    assert "points below AR" in rows["hasty"]["advice"]
    assert all(row["tokens_per_second"] > 0 and row["tokens_per_second_error"] >= 0 for row in rows.values())
    few = compare(*asked[:2], asked[2][:2], DECODERS)
    assert {row["right_error"] for row in few} == {None}  # too few prompts
    unknown = compare(*asked[:2], [Prompt.of("Sort 1, 2")], {"plain": DECODERS["plain"]})
    assert unknown[0]["right"] is None


def test_another_metric_and_another_model_take_their_places(asked, tmp_path, monkeypatch):
    model, tokenizer, _ = asked
    other = tiny_model(seed=1)
    decoders = {"plain": DECODERS["plain"], "other": {"model": other, **DECODERS["plain"]}}
    numbers = [Prompt.of(f"Count {index}", answers=(f"The answer is {index}.",)) for index in range(6)]
    monkeypatch.setattr(comparing, "measure", lambda model, tokenizer, encoded, decoders, **_: [
        {"decoder": name, "prompt": place, "right": prompt.score(f"{place} or {place}"), "new_tokens": 4,
         "forwards": 4, "token_instances": 3, "seconds": 1.0 + (options.get("model") is other)}
        for name, options in decoders.items() for place, prompt in enumerate(encoded)
    ])  # fmt: skip
    first, second = compare(model, tokenizer, numbers, decoders, metric="number")
    assert first["right"] == second["right"] == 1
    assert first["tokens_per_second"] == 2 * second["tokens_per_second"] == 4
    assert {row["right"] for row in compare(model, tokenizer, numbers, decoders)} == {0}  # by the rule of the prompts
    with pytest.raises(ValueError, match="`metric='json'` needs an `answer` to each prompt"):
        compare(model, tokenizer, [*numbers, Prompt.of("?")], decoders, metric="json")
    with pytest.raises(ValueError, match="There is no metric"):
        compare(model, tokenizer, numbers, decoders, metric=str(tmp_path / "none"))


@pytest.mark.parametrize(("quality", "per_forward", "per_second", "said"), [
    (1.0, 3.0, 30, ()), (0.99, 3.0, 30, ()), (0.9, 3.0, 30, ("10 points below AR", "verification='exact'")),
    (1.0, 0.9, 8, ("0.90 tokens per forward gain nothing", "raise `entropy_threshold`")),
    (1.0, 1.5, 8, ("Slower than AR though", "`window_size`")),
    (0.2, 0.9, 8, ("80 points below AR", "0.90 tokens per forward")),
])  # fmt: skip
def test_a_row_that_is_wrong_or_slow_says_why_and_what_to_do(quality, per_forward, per_second, said):
    def row(*numbers):
        return dict(zip(("quality", "quality_error", "tokens_per_forward", "tokens_per_second"), numbers, strict=True))

    own, model = row(quality, 0.01, per_forward, per_second), tiny_model()
    found = pd.DataFrame.from_dict({"ar": row(1.0, 0.0, 1.0, 10), "block": own, "exact": own}, orient="index")
    block = {"model": model, "strategy": "block"}
    decoders = {"ar": {"model": model}, "block": block, "exact": {**block, "verification": "exact"}}
    told = advice(found, decoders)
    assert told["ar"] == told["exact"] == "" and all(words in told["block"] for words in said)
    assert bool(told["block"]) == bool(said)
    assert advice(found, decoders | {"ar": {"model": tiny_model()}})["block"] == ""  # AR of another model
