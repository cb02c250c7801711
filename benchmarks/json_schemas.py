"""Random JSON schemas on wedlm-nano: do answers follow them, is verified decoding AR's, and what is left of its gain?

    python benchmarks/json_schemas.py --schemas 200

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

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer
from wedlm_hf.eval.measure import pad_left
from wedlm_hf.eval.prompts import encode
from wedlm_hf.generation.grammar import Grammar, JSONConstraint

PROMPTS = ["Count from 5 to 50 by 5.", "Sort 31, 7, 12, 5", "Write JSON about Ada, who lives in London."]
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
    output = model.generate(
        **inputs, **options, max_new_tokens=limit, return_dict_in_generate=True,
        logits_processor=[JSONConstraint(Grammar(tokenizer, schema))],
    )  # fmt: skip
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


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--limit", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(NANO), load_tokenizer(NANO)
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
    counts = f"{len(other)} texts other than AR's, {len(faults)} invalid, {cut} cut off"
    print(f"{options.schemas} schemas: {counts}")
    print(f"{new_tokens} tokens in {forwards} forwards: {new_tokens / forwards:.2f} tokens per forward (AR: 1)")
    for each in (*other[:3], *faults[:3]):
        print(each)
    sys.exit(bool(other or faults))


if __name__ == "__main__":
    main()
