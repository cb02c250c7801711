"""lm-evaluation-harness with WeDLM: the model `wedlm`, offline tasks, the suite of the paper's benchmarks.

    python -m wedlm_hf.eval run --model wedlm --model_args pretrained=PATH,strategy=wedlm --tasks wedlm_nano

From Python, importing this package registers the model: `lm_eval.simple_evaluate(model="wedlm", …)`.
"""

from .model import WeDLMHarnessLM
from .run import evaluate

__all__ = ["WeDLMHarnessLM", "evaluate"]
