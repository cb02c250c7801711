"""What `wedlm generate` decodes: prompts, next to AR decoding if you like."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..console.prompts import Turns
from ..generation.settings import SETTING_NAMES
from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, Options
from .prompts import Prompt, answer_limit, encode_prompt


@dataclass(frozen=True)
class AnswerRequest:
    """Prompts, and how to decode them."""

    prompts: Sequence[str | Turns]  # at least one; a text is a single turn of the user
    options: Options  # keywords of `generate`, `strategy` among them
    with_ar: bool = True  # AR decoding of each prompt too, right after, with the same options where they apply
    raw: bool = False  # take prompts as they are, without the chat template
    seed: int = 0  # of sampling, set anew for each prompt and decoder

    def encode(self, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int]]]:
        """Each prompt and its tokens. Raises `ValueError` as [`encode_prompt`]."""
        encoded = (encode_prompt(model, tokenizer, Prompt.of(prompt), raw=self.raw) for prompt in self.prompts)
        return [(prompt.text, list(prompt.tokens)) for prompt in encoded]

    def decoders(self, model: WeDLMForCausalLM, prompt_length: int) -> dict[str, Options]:
        """Keywords of `generate` by strategy: the one that was asked for, then AR with what applies to it. Where no
        limit of new tokens is given or stored, it is that of [`answer_limit`]."""
        config = model.generation_config
        is_limited = config.max_new_tokens is not None or config.max_length is not None
        limit = {} if is_limited else {"max_new_tokens": answer_limit(model, prompt_length)}
        decoders: dict[str, Options] = {self.options["strategy"]: {**limit, **self.options}}
        if self.with_ar:
            shared = {name: value for name, value in self.options.items() if name not in SETTING_NAMES}
            decoders.setdefault(AR, {**limit, **shared, "strategy": AR})
        return decoders
