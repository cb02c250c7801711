"""What is checked before a folder goes to the Hub: files, code, answers without this package, and the model card.

Each check gives a line; one that found a problem says how to mend it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ...adapters.adapter_files import PEFT_TYPE
from ...modeling_wedlm.card import (
    CARD_NAME,
    for_repository,
    is_ours,
    is_written_by_a_person,
    model_card,
    read_card,
)
from ...modeling_wedlm.hub import AUTO_MAP, hub_files
from ...modeling_wedlm.loading import (
    ADAPTER_FILE,
    CONFIG_FILE,
    base_path,
    is_adapter,
    load_config_dict,
    load_model,
    load_tokenizer,
)
from .request import PushRequest

PROMPTS = ("Count from 1 to 20: 1, 2, 3,", "The capital of France is", "def add(a, b):\n    return")
NEW_TOKENS = 24
CALLS: dict[str, dict[str, Any]] = {
    "ar": {"strategy": "ar"},
    "wedlm": {"strategy": "wedlm", "verification": "none"},
    "wedlm, verified": {"strategy": "wedlm", "verification": "exact"},
}
LARGEST_FILE = 50 * 10**9  # bytes; the Hub's limit for one file
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
LEFT_OUT: tuple[str, ...] = ("_*", "checkpoint-*", "runs", "base", "work", "__pycache__", "training_args.bin")
LEFT_OUT += ("trainer_state.json", "optimizer*", "scheduler*", "rng_state*")
"""What a training leaves in its folder and a user of the model does not need; and what begins with a dot."""


@dataclass(frozen=True)
class Check:
    """The outcome of a check.

    Attributes:
        name: what was checked.
        found: in words.
        is_good: whether the folder may go as it is.
    """

    name: str
    found: str
    is_good: bool = True


@dataclass
class Package:
    """What would be uploaded, and what was found about it."""

    files: dict[str, Path]
    card: str | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether all checks passed."""
        return all(check.is_good for check in self.checks)


def check_folder(request: PushRequest, report: Callable[[Check], None]) -> Package:
    """Checks a folder, and decides what of it would be uploaded.

    Args:
        request: what is wanted.
        report: called with each check when it is done.

    Raises:
        OSError: for a folder without model and without adapter.
        ValueError: for a card of a person's own where another licence was asked for.
    """
    is_model = not is_adapter(request.folder)
    if is_model and not (request.folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"{str(request.folder)!r} holds neither a model ({CONFIG_FILE}) nor an adapter ({ADAPTER_FILE})."
        )
    package = Package(dict(_files(request.folder)))

    def done(check: Check) -> Check:
        package.checks.append(check)
        report(check)
        return check

    done(_weights(package, is_model))
    code = done(_code(request) if is_model else Check("code", "An adapter needs none: it comes with the base."))
    if is_model:
        done(_tokenizer(request))
    # One after the other: there is room for one model.
    other = _without_package(request, is_model) if code.is_good else "its code was not run."
    model, problem = _load(request, is_model)
    done(_answers(request, is_model, model, problem, other))
    done(_card(request, package, is_model, model))
    return package


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each file that goes to the Hub."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_left_out = any(part.startswith(".") or _matches(part) for part in parts)
        if path.is_file() and not is_left_out:
            yield "/".join(parts), path


def _matches(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in LEFT_OUT)


def _weights(package: Package, is_model: bool) -> Check:
    """Safetensors alone, whole, none too large."""
    sizes = {name: path.stat().st_size for name, path in package.files.items()}
    weights = [name for name in sizes if name.endswith(".safetensors")]
    pickles = [name for name in sizes if Path(name).suffix in PICKLES]
    found = f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB; the largest: "
    largest = max(sizes, key=lambda name: sizes[name])
    found += f"{largest}, {sizes[largest] / 1e6:,.1f} MB."
    problems = []
    if pickles:
        problems.append(f"{', '.join(pickles)}: pickled files can run code when they are loaded. Remove them.")
    if not weights:
        problems.append(f"There are no weights: {'model' if is_model else 'adapter_model'}.safetensors.")
    problems += [
        f"{name} has {size / 1e9:.0f} GB, the Hub takes {LARGEST_FILE / 1e9:.0f}: save it with a smaller "
        "`max_shard_size`."
        for name, size in sizes.items()
        if size > LARGEST_FILE
    ]
    for name in weights:
        try:
            with safe_open(package.files[name], "pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} is damaged: {error}.")
    return Check("files", " ".join([found, *problems]), not problems)


def _code(request: PushRequest) -> Check:
    """The code beside a model's weights is all there, and this version's: no other is run unasked."""
    stated = json.loads((request.folder / CONFIG_FILE).read_bytes()).get("auto_map")
    mend = "load the model with `wedlm_hf.WeDLMForCausalLM` and save it again"
    if stated != AUTO_MAP:
        return Check("code", f"{CONFIG_FILE} does not name it (`auto_map` is {stated!r}): {mend}.", is_good=False)
    names = hub_files()
    there = {name: request.folder / name for name in names if (request.folder / name).is_file()}
    other = [name for name in names if name not in there or there[name].read_bytes() != names[name].encode()]
    if not other:
        return Check("code", f"{len(names)} files beside the weights, those of this version.")
    found = f"{', '.join(other)}: missing or not as in this version of the package"
    if request.trust_remote_code:
        return Check("code", f"{found}; run because of `--trust-remote-code`.")
    return Check("code", f"{found}: {mend}, or pass `--trust-remote-code` to run what is there.", is_good=False)


def _card(request: PushRequest, package: Package, is_model: bool, model: Any) -> Check:
    """The model card: made or brought up to date, unless a person wrote it; then its metadata."""
    text = read_card(request.folder)
    is_own = is_written_by_a_person(text) and not (request.overwrite_card and is_model)
    if is_own and request.license is not None:
        raise ValueError(f"`--license`: {CARD_NAME} was written by a person; state the licence at its top.")
    if not is_own and not is_ours(text):
        text = model_card(model, request.folder) if is_model and model is not None else None
    if text is None:
        return Check("card", f"There is no {CARD_NAME}: write one, or run `wedlm adapt` to its end.", is_good=False)
    if not is_own:
        text = for_repository(text, request.repo, license=request.license)
    package.card = text
    problems = _metadata_problems(text, is_model)
    found = "a person's own" if is_own else "written by this package"
    if "<!-- measured: " in text and "Nothing yet:" in text:
        found += ", without measured numbers"
    return Check("card", " ".join([f"{CARD_NAME}, {found}.", *problems]), not problems)


def _metadata_problems(text: str, is_model: bool) -> list[str]:
    try:
        data: Any = ModelCard(text).data
    except Exception as error:  # YAML's kinds, and values of a wrong type
        return [f"Its metadata cannot be read: {' '.join(str(error).split())}."]
    problems = []
    if data.license is None:
        problems.append("It states no `license`: pass `--license`, or write it at its top.")
    if data.license == "other" and data.license_link is None:
        problems.append("With `license: other` it must have a `license_link`.")
    if data.pipeline_tag != "text-generation":
        problems.append(f"`pipeline_tag` must be 'text-generation', got {data.pipeline_tag!r}.")
    library = "transformers" if is_model else "peft"
    if data.library_name != library:
        problems.append(f"`library_name` must be {library!r}, got {data.library_name!r}.")
    bases = [data.base_model] if isinstance(data.base_model, str) else data.base_model or []
    if not is_model and not bases:
        problems.append("It names no `base_model`: the Hub id of the model that the adapter was trained for.")
    problems += [f"`base_model` must be a Hub id, got {base!r}." for base in bases if os.path.exists(base)]
    if "[More Information Needed]" in text:
        problems.append("It has places that say [More Information Needed].")
    return problems


def _tokenizer(request: PushRequest) -> Check:
    """A tokenizer that needs no code and has the model's mask token."""
    try:
        tokenizer = load_tokenizer(request.folder)
        mask_token_id = load_config_dict(request.folder).get("mask_token_id")
    except (OSError, ValueError) as error:
        return Check("tokenizer", str(error), is_good=False)
    if mask_token_id is not None and tokenizer.mask_token_id != mask_token_id:
        found = f"Its mask token is id {tokenizer.mask_token_id}, the model's is {mask_token_id}."
        return Check("tokenizer", found, is_good=False)
    template = "with" if tokenizer.chat_template else "without"
    return Check("tokenizer", f"{len(tokenizer):,} tokens, {template} a chat template.")


def _source(request: PushRequest, is_model: bool) -> str:
    """Folder or Hub id of the model to load; of an adapter, its base."""
    source = str(request.folder) if is_model else request.base or base_path(request.folder)
    return os.path.abspath(source) if os.path.isdir(source) else source


def _load(request: PushRequest, is_model: bool) -> tuple[Any, str]:
    """The model by this package, or None and why it cannot be loaded."""
    try:
        model = load_model(_source(request, is_model)).eval()
        if not is_model:
            model.load_adapter(str(request.folder))
    except (OSError, ValueError) as error:
        return None, str(error)
    return model, ""


def _calls(request: PushRequest, is_model: bool) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` of each call that is compared."""
    names = set(CALLS)
    if not is_model and json.loads((request.folder / ADAPTER_FILE).read_bytes()).get("peft_type") == PEFT_TYPE:
        names -= {"wedlm"}  # a mask adapter decodes verified
    shared = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "repetition_penalty": 1.0}
    return {name: options | shared for name, options in CALLS.items() if name in names}


def _answers(request: PushRequest, is_model: bool, model: Any, problem: str, other: dict[str, Any] | str) -> Check:
    """The same tokens by this package and by the code that is uploaded, which gave `other`, or failed."""
    if model is None:
        return Check("answers", f"It cannot be loaded: {problem}", is_good=False)
    if isinstance(other, str):
        return Check("answers", f"None in a process without this package: {other}", is_good=False)
    tokenizer, calls = load_tokenizer(_source(request, is_model)), _calls(request, is_model)
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    if other["prompts"] != [each["input_ids"][0].tolist() for each in inputs]:
        return Check("answers", "The tokenizer reads prompts otherwise without this package.", is_good=False)
    own = {
        name: [model.generate(**each, **options)[0, each["input_ids"].shape[1] :].tolist() for each in inputs]
        for name, options in calls.items()
    }
    if different := [name for name, answers in own.items() if answers != other["answers"][name]]:
        return Check("answers", f"Others without this package ({', '.join(different)}).", is_good=False)
    tokens = sum(len(answer) for answers in own.values() for answer in answers)
    found = f"{tokens} tokens ({'; '.join(calls)}) in a process without this package, each the same as with it."
    return Check("answers", found)


def _without_package(request: PushRequest, is_model: bool) -> dict[str, Any] | str:
    """What [`remote_code`] generates, or the last line of its error."""
    job = {
        "model": _source(request, is_model),
        "adapter": None if is_model else str(request.folder.absolute()),
        "prompts": PROMPTS,
        "calls": _calls(request, is_model),
        "threads": torch.get_num_threads(),
    }
    script = Path(__file__).with_name("remote_code.py").absolute()
    with tempfile.TemporaryDirectory(prefix="wedlm-push-") as folder:
        result = subprocess.run(
            [sys.executable, "-I", str(script)],
            input=json.dumps(job),
            env=os.environ | {"HF_MODULES_CACHE": str(Path(folder, "code")), "TOKENIZERS_PARALLELISM": "false"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        return (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer
