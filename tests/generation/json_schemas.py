"""Random JSON schemas on wedlm-nano: do answers follow them, is verified decoding AR's, and what is left of its gain?

    python tests/generation/json_schemas.py --schemas 200
    python tests/generation/json_schemas.py --schemas 0 --records 16 --limit 120 --model FILE.gguf --adapter ADAPTER

Records are one schema that people might ask for, and prompts that fit it: answered with the schema and freely.
Each schema is answered by AR and by verified decoding under the same constraint, one prompt at a time and in batches.
An answer that is cut off by its length is no JSON; the limit is large enough for almost all.
"""

import argparse
import json
import random
import sys
from typing import Any

import jsonschema
import torch

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.measure import pad_left
from wedlm_hf.eval.prompts import encode
from wedlm_hf.generation.grammar import Grammar, JSONConstraint

PROMPTS = ["Count from 5 to 50 by 5.", "Sort 31, 7, 12, 5", "Write JSON about Ada, who lives in London."]
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
PEOPLE = ["Ada, a pilot", "Ben, a cook", "Clara, a nurse", "David, a farmer", "Emma, a judge", "Felix, a baker",
          "Grace, a singer", "Hugo, a teacher"]  # fmt: skip
CITIES = ["London", "Lisbon", "Oslo", "Rome", "Cairo"]
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
DECODERS = {"ar": {"strategy": "ar"}, "exact": {"strategy": "wedlm", "verification": "exact"}}


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short; `depth` levels of lists and objects."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "anyOf"]
    kind = chance.choice(kinds + ["object", "array"] * 3 if depth else kinds)
    if kind == "string":
        return {"type": "string", "minLength": chance.randrange(3), "maxLength": chance.randrange(3, 9)}
    if kind in ("integer", "number"):
        low = chance.randrange(-20, 20)
        digits = {"multipleOf": chance.choice([1, 2, 5])} if kind == "integer" and chance.random() < 0.3 else {}
        return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(10, 200)} | digits
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", 5, 10, None, True, [1, 2], {"a": 1}], chance.randrange(1, 5))}
    if kind == "const":
        return {"const": chance.choice(["Ada", 42, {"city": "London"}, [5, 10, 15]])}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-z]{2,5}$", "^(5|10|15)$", "^[A-Z][a-z]+ [0-9]{2}$"])}
    if kind == "format":
        return {"type": "string", "format": chance.choice(["date", "time", "ipv4", "uuid"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, 0) for _ in range(2)]}
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(chance, depth - 1),
            "minItems": chance.randrange(3),
            "maxItems": 4,
        }
    if kind == "object":
        names = chance.sample(["name", "n", "city", "ä b", 'x"y'], chance.randrange(1, 4))
        properties = {name: random_schema(chance, depth - 1) for name in names}
        required = [name for name in names if chance.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def answers(model: Any, tokenizer: Any, schema: Any, prompts: list[str], limit: int, **options: Any) -> Any:
    """The texts, and new tokens and forwards if they are counted."""
    inputs = pad_left([encode(tokenizer, [{"role": "user", "content": each}]) for each in prompts], 0, model.device)
    if schema is not None:
        options["logits_processor"] = [JSONConstraint(Grammar(tokenizer, schema))]
    output = model.generate(**inputs, **options, max_new_tokens=limit, return_dict_in_generate=True)
    stats = getattr(output, "stats", None)
    counts = (0, 0) if stats is None else (int(stats.new_tokens.sum()), int(stats.forwards.sum()))
    return tokenizer.batch_decode(
        output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    ), counts


def fault(text: str, schema: Any) -> str | None:
    """What is wrong with an answer; `None` for nothing."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
    except ValueError as error:
        return f"cut off or no JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"invalid: {error.message}"
    return None


def records(model: Any, tokenizer: Any, count: int, limit: int) -> list[Any]:
    """Prints what verified decoding gives for a usual schema; returns the texts that are not AR's or are invalid."""
    prompts = [f"Write a JSON record about {person} who lives in {city}." for person in PEOPLE for city in CITIES]
    wrong = []
    for schema in (RECORD, None):
        total = torch.zeros(2, dtype=torch.int64)
        for prompt in prompts[:count]:
            ar, _ = answers(model, tokenizer, schema, [prompt], limit, **DECODERS["ar"])
            exact, counts = answers(model, tokenizer, schema, [prompt], limit, **DECODERS["exact"])
            total += torch.tensor(counts)
            said = fault(exact[0], schema) if schema else None
            wrong += [(ar, exact, said)] if ar != exact or (said and said.startswith("invalid")) else []
        new_tokens, forwards = total.tolist()
        kind = "with the schema" if schema else "freely"
        print(f"{count} records {kind}: {new_tokens} tokens in {forwards} forwards, {new_tokens / forwards:.2f} each")
    print(f"{len(wrong)} of {2 * count} texts other than AR's, or invalid")
    return wrong


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--records", type=int, default=0, help="up to 40")
    parser.add_argument("--model", default=str(NANO))
    parser.add_argument("--adapter")
    parser.add_argument("--limit", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_adapted(options.model, options.adapter)
    model.eval()
    wrong = records(model, tokenizer, options.records, options.limit) if options.records else []
    cut, faults, other, new_tokens, forwards = 0, [], [], 0, 0
    for number in range(options.schemas):
        chance = random.Random(number)
        schema, prompts = random_schema(chance), PROMPTS if number % 4 == 0 else [PROMPTS[number % 3]]
        ar, _ = answers(model, tokenizer, schema, prompts, options.limit, **DECODERS["ar"])
        exact, counts = answers(model, tokenizer, schema, prompts, options.limit, **DECODERS["exact"])
        other += [(schema, ar, exact)] if ar != exact else []
        new_tokens, forwards = new_tokens + counts[0], forwards + counts[1]
        for text in exact:
            said = fault(text, schema)
            cut += said is not None and said.startswith("cut off")
            faults += [(schema, text, said)] if said and said.startswith("invalid") else []
        if number % 20 == 19:
            print(f"{number + 1} schemas: {new_tokens / forwards:.2f} tokens per forward, {cut} cut off", flush=True)
    if options.schemas:
        counts = f"{len(other)} texts other than AR's, {len(faults)} invalid, {cut} cut off"
        print(f"{options.schemas} schemas: {counts}")
        print(f"{new_tokens} tokens in {forwards} forwards: {new_tokens / forwards:.2f} tokens per forward (AR: 1)")
    for each in (*wrong[:3], *other[:3], *faults[:3]):
        print(each)
    sys.exit(bool(wrong or other or faults))


if __name__ == "__main__":
    main()
