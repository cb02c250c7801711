"""When a reply is right: JSON values and final numbers, however they are written, and any metric of `evaluate`."""

import json
import random
import shutil
import sys
from pathlib import Path

import evaluate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wedlm_hf.eval import metrics
from wedlm_hf.eval.metrics import judge
from wedlm_hf.eval.metrics.final_number.last_number import final_number, same_number
from wedlm_hf.eval.metrics.json_match.values import same_json

FOLDER = Path(metrics.__file__).parent
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9).map(lambda x: round(x, 3)) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def rewritten(value, drawn):
    """The same value with other orders of keys and other forms of whole numbers."""
    if isinstance(value, dict):
        return {key: rewritten(value[key], drawn) for key in drawn.sample([*value], len(value))}
    if isinstance(value, list):
        return [rewritten(each, drawn) for each in value]
    return float(value) if type(value) is int and drawn.random() < 0.5 else value


@given(VALUES, st.randoms(use_true_random=False), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_a_json_value_is_the_same_however_it_is_written_and_another_is_not(value, drawn, indent, is_ascii):
    text = json.dumps(rewritten(value, drawn), indent=indent, ensure_ascii=is_ascii)
    assert same_json(f" {text}\n", json.dumps(value))
    assert not same_json(json.dumps([value]), json.dumps(value))
    inside = f"Here you are (as asked):\n```json\n{json.dumps({'a': value})}\n```\nIs there more?"
    assert same_json(inside, json.dumps({"a": value}))


@pytest.mark.parametrize(("reply", "answer", "right"), [
    ('{"a": 1, "b": [2, 3]}', '{"b":[2,3],"a":1.0}', True), ('{"b": [3, 2]}', '{"b": [2, 3]}', False),
    ('{"a": true}', '{"a": 1}', False), ('{"a": "1"}', '{"a": 1}', False), ('{"a": 1, "b": 2}', '{"a": 1}', False),
    ("1200.0", "1200", True), ('"yes"', '"yes"', True), ("The answer is 5", "5", False), ('{"a": NaN}', "{}", False),
    ('{"a": 1', '{"a": 1}', False), ("", "{}", False), ("{}", "no value", False), ("[" * 100_000, "[]", False),
    ('so {this} is {"a": 1} or {"a": 2}', '{"a": 1}', True), ('{"é": "ü"}', '{"\\u00e9": "\\u00fc"}', True),
])  # fmt: skip
def test_json_around_which_there_is_text_counts_by_its_first_object_or_array(reply, answer, right):
    assert same_json(reply, answer) is right


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{:,}", "{}", "{}.0", "{:,}.00", "${:,}", "= {} apples."]))
def test_a_number_is_the_same_however_it_is_written(number, form):
    sign = "" if number >= 0 else random.Random(number).choice("-−")
    text = sign + form.format(abs(number)) if "= " not in form else form.format(number)
    if "$" not in form:  # "-$5" has no number with a sign
        assert final_number(f"3 and 17 make {text}") == number
    assert same_number(f"9,876 of them; {abs(number)}", str(abs(number)))
    assert not same_number(str(number + 1), str(number))


@pytest.mark.parametrize(("text", "number"), [
    ("1,200", 1200), ("1200.0", 1200), ("1.2e3", 1200), ("7-3", 3), ("It is -3.", -3), ("(−3)", -3), ("1,2,3", 3),
    ("$5.50 each", 5.5), ("3.", 3), ("2x4", 4), ("7*6=42\nAnswer: 42", 42), ("1,042 - 1,000 makes 42.0", 42),
    ("none at all", None), ("0.1", 0.1), ("12,345,678.9", 12345678.9),
])  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    found = final_number(text)
    assert found == number or float(found) == number


@pytest.mark.parametrize(("name", "right", "wrong"), [
    ("json_match", ('ok: {"a": 1.0}', '{"a": 1}'), ("{}", "[]")), ("final_number", ("so 1,200.", "1200"), ("2", "3")),
])  # fmt: skip
def test_our_metrics_load_from_their_folders_wherever_these_are_and_give_shares(name, right, wrong, tmp_path):
    shutil.copytree(FOLDER / name, tmp_path / name)  # as on the Hub, where nothing else of this package is
    metric = evaluate.load(str(tmp_path / name))
    predictions, references = zip(right, wrong, wrong, right, strict=True)
    assert metric.compute(predictions=predictions, references=references) == {name: 0.5}
    assert judge(str(tmp_path / name))(right[0], ["no", right[1]]) == 1


METRIC = """
import datasets
import evaluate

class Given(evaluate.Metric):
    def _info(self):
        value = datasets.Value("{kind}")
        return evaluate.MetricInfo(description="", citation="", inputs_description="",
                                   features=datasets.Features(predictions=value, references=value))
    def _compute(self, predictions, references):
        return {result}
"""


def written(folder, name, result, kind="string"):
    (folder / name).mkdir()
    (folder / name / f"{name}.py").write_text(METRIC.format(result=result, kind=kind))
    return str(folder / name)


def test_any_metric_judges_on_its_own_scale_and_one_that_cannot_is_refused(tmp_path):
    longest = "100.0 * min(len(predictions[0]), len(references[0])) / len(references[0])"
    percent = judge(written(tmp_path, "percent", f"{{'note': 'x', 'percent': {longest}}}"))
    assert (percent("ab", ["abcd", "abc"]), percent("", ["a"])) == (pytest.approx(2 / 3), 0)
    for name, result, kind, message in (
        ("errors", "{'errors': 0.0}", "string", "gives 0 to a reply that is the answer itself"),
        ("classes", "{'accuracy': 1.0}", "int64", "compares no text with a text"),
        ("words", "{'words': 'none'}", "string", "gives no number"),
        ("broken", "1 / 0", "string", "compares no text with a text: division by zero"),
    ):
        with pytest.raises(ValueError, match=message):
            judge(written(tmp_path, name, result, kind))
    with pytest.raises(ValueError, match=r"There is no metric '.*nowhere' \(exact, number, json, a folder, or a name"):
        judge(str(tmp_path / "nowhere"))


def test_without_the_library_our_rules_judge_and_others_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    assert judge("exact")(" a ", ["b", "a"]) == 1 and judge("json")("{}", ["[]"]) == 0
    with pytest.raises(ValueError, match=r"'bleu' needs evaluate: pip install '\.\[eval\]'"):
        judge("bleu")
